from __future__ import annotations

import pytest

from tests.upgrade.tree import FROM

# The tests run another commit's code, and so need the history: `make upgrade`.
collect_ignore = [] if FROM else ["test_rolling.py"]


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences the SDK, which reports an API outage for half a minute."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

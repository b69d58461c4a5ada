from __future__ import annotations

import pytest

from tests.upgrade.tree import FROM

# It runs another commit's code, and so needs the history: `make upgrade`.
collect_ignore = [] if FROM else ["test_rolling.py"]


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an API that is away the SDK reports for half a minute."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

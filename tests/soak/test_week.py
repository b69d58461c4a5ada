"""The short form of `make week`: half a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.stack import running
from tests.models import tiny_qwen3
from tests.soak import week
from tests.soak.clock import Clock


@pytest.mark.timeout(1200)
def test_hours_that_jump_beside_kills_change_no_result_and_no_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK reports its own outage for half a minute
    clock = Clock(tmp_path)
    with running(week.stack(tmp_path, tiny_qwen3(tmp_path / "base"), clock)) as stack:
        report = week.Week(stack, clock, 1, week.SHORT).run()
    assert not report.faults, f"see {tmp_path}/week.log and {tmp_path}/data/logs"
    assert (report.hours, report.left, report.dealt) == (12, 6, week.SHORT.dose)

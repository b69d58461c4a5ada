"""The short form of `make chaos`, with a fixed seed. Any seed that ever fails is added to the list."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.chaos import forms, stack
from tests.chaos.__main__ import judge, run
from tests.chaos.killer import stop_if_alive
from tests.chaos.observer import await_true
from tests.chaos.run import Report
from tests.models import tiny_qwen3

SEEDS = (1,)


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences the SDK, which reports its own outage for half a minute."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_dies_every_client_gets_to_the_bit_what_it_gets_undisturbed(base: Path, tmp_path: Path, seed: int):
    report = run(stack.light(tmp_path, base), seed, forms.SHORT)
    assert not judge(report, forms.SHORT), f"see {tmp_path}/chaos.log and {tmp_path}/data/logs: {report}"


@pytest.mark.timeout(1800)
def test_where_passes_are_shared_nothing_is_lost_doubled_or_changed_and_all_is_within_the_bound(
    base: Path, tmp_path: Path
):
    report = run(stack.merging(tmp_path, base), SEEDS[0], forms.MERGED)
    assert not judge(report, forms.MERGED), f"see {tmp_path}/chaos.log and {tmp_path}/data/logs: {report}"


@pytest.mark.timeout(1800)
def test_a_killed_rank_changes_no_result(base: Path, tmp_path: Path):
    report = run(stack.ranked(tmp_path, base), SEEDS[0], forms.RANKS)
    assert not judge(report, forms.RANKS), f"see {tmp_path}/chaos.log and {tmp_path}/data/logs: {report}"


def test_a_trainer_that_ended_after_it_was_found_is_left_alone():
    trainer = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(trainer.pid)
    try:
        assert stop_if_alive(process)
        await_true("the trainer to stop", lambda: process.status() == psutil.STATUS_STOPPED)
    finally:
        trainer.kill()
        trainer.wait()
    assert not stop_if_alive(process)


def test_a_run_that_hit_too_little_is_no_proof():
    idle = Report(seed=1, plays=9, dealt=forms.SHORT.dose, admissions_posted=10**6)
    assert judge(idle, forms.SHORT) == ["only 0 of 8 changes of owner", "only 0 of 1 refused commits"]

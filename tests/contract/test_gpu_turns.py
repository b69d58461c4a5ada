"""With `sampler.sleep`, the trainer and the sampler of a whole stack take turns, by a lock on one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker

from app import settings
from tests.contract.data import train
from tests.contract.stack import BASE, Stack
from tests.contract.test_restart import children
from tests.contract.test_samplers import ask, drawn


def holder(stack: Stack) -> int:
    """The process that has the turn."""
    folder = settings.load(stack.data_dir / "run" / "settings.toml", {}).handover_dir
    inode = (folder / f"adapters,{BASE.replace('/', ',')}.turn").stat().st_ino
    [pid] = [line.split()[4] for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
    return int(pid)


@pytest.mark.parametrize("stack", ["deepspeed-2-ranks-vllm"], indirect=True)
def test_whoever_works_has_the_turn(training: tinker.TrainingClient, stack: Stack) -> None:
    [sampler] = children(stack, "--name sampler")
    trainer = {process.pid for process in children(stack, "--name trainer")}
    for _ in range(2):
        train(training, 1)
        assert holder(stack) in trainer
        drawn(ask(training.save_weights_and_get_sampling_client().result(), 1, 4))
        assert holder(stack) == sampler.pid

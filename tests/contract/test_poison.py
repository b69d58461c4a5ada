"""R15: an Op that kills its trainer every time costs its own run one call, and affects no other run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.contract.data import ADAM, datum, logprobs, sentences, supervised, train
from tests.contract.poisoned_up import POISON
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import undisturbed
from tests.servers import free_port


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("poisoned") / "data"
    engine = "[engine]\nlease_s = 3.0\nring_again_s = 1.0"
    sampler, trainer = 'backend = "transformers"', 'backend = "torch"'
    program = "tests.contract.poisoned_up"
    stack = Stack(folder, base_path, free_port(), trainer, sampler, engine, program, threads=1)
    with running(stack):
        yield stack


def test_two_poisonous_ops_fail_alone_and_the_other_run_does_not_notice(poisoned: Stack):
    with poisoned.client() as service:
        expected = undisturbed(service, 3)
        sick = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
        well = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
        train(sick, 1)
        train(well, 1)
        deadly = [datum([POISON, *sentences(1)[0]])]
        for _ in range(2):
            lost = sick.forward_backward(deadly, "cross_entropy")
            step = sick.optim_step(ADAM)
            beside = well.forward_backward(supervised(), "cross_entropy"), well.optim_step(ADAM)
            with pytest.raises(tinker.RequestFailedError, match="could not be run in 3 attempts"):
                lost.result()
            with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
                step.result()
            assert all(future.result() for future in beside)
        train(sick, 2)
        for client in (sick, well):
            found = client.forward(supervised(seed=8), "cross_entropy").result()
            assert np.array_equal(logprobs(found), expected)

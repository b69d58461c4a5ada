"""A rank group with a rank that dies or hangs: the group restarts, and the run ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

from app import ids
from app.stores.redis import keys
from tests.contract.data import ADAM, logprobs, supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import await_true, children, is_gone, undisturbed
from tests.servers import free_port
from tests.warm_ranks import rank_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ranks") / "data"
    trainer = 'backend = "deepspeed"\nzero_stage = 2\nranks = 2\nrank_deadline_s = 25.0'
    sampler, engine, program = 'backend = "transformers"', "[engine]\nlease_s = 3.0", "tests.warm_ranks"
    stack = Stack(folder, base_path, free_port(), trainer, sampler, engine, program, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        # A stopped rank does not handle SIGTERM: torchrun kills it after this time instead of 30 s.
        patch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
        with running(stack):
            yield stack


@pytest.fixture
def service(ranks: Stack) -> Iterator[tinker.ServiceClient]:
    with ranks.client() as client:
        yield client


def group(stack: Stack) -> tuple[psutil.Process, psutil.Process]:
    """Processes of rank 0 and of rank 1."""
    [launcher] = children(stack, "workers.process.torchrun")
    leader, follower = sorted(launcher.children(), key=rank_of)
    return leader, follower


def attempts(stack: Stack, model_id: str) -> list[int]:
    """Attempts of each journaled Op of the model."""
    with stack.redis() as client:
        found = list(client.scan_iter(keys.op(f"{model_id}:*")))
        assert found
        return [int(client.hget(key, "attempts")) for key in found]


def await_running(stack: Stack, model_id: str, seq: int) -> None:
    with stack.redis() as client:
        await_true(lambda: client.hexists(keys.op(ids.request_id(model_id, seq)), "runner"))


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_run_survives_a_rank_that_ends_in_the_middle_of_an_op(
    ranks: Stack, service: tinker.ServiceClient, end: str
) -> None:
    expected = undisturbed(service, 4)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 2)
    leader, follower = group(ranks)
    follower.suspend()
    # Each of them dispatches, and so might have been an attempt.
    pending = [(client.forward_backward(supervised(), "cross_entropy"), client.optim_step(ADAM)) for _ in range(2)]
    await_running(ranks, client.model_id, seq=5)
    if end == "dies":
        follower.kill()
    assert all(forward.result() and step.result() for forward, step in pending)
    assert is_gone(leader), "rank 0 would have gone on alone"
    assert np.array_equal(logprobs(client.forward(supervised(seed=8), "cross_entropy").result()), expected)
    assert set(attempts(ranks, client.model_id)) <= {0, 1}, "one end, one attempt at most"


def test_a_rank_that_dies_while_nothing_runs_is_missed_by_nobody(ranks: Stack, service: tinker.ServiceClient) -> None:
    expected = undisturbed(service, 2)
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    train(client, 1)
    leader, follower = group(ranks)
    follower.kill()
    await_true(lambda: is_gone(leader))
    train(client, 1)
    assert np.array_equal(logprobs(client.forward(supervised(seed=8), "cross_entropy").result()), expected)

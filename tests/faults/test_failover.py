"""The primary of a state server behind sentinels is lost for good while a client trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tinker

from app.stores.redis import keys
from tests.contract.data import ADAM, supervised
from tests.faults.stack import BASE, Stack
from tests.sentinels import SentinelSet
from tests.servers import start_valkey

HALF = 4


@pytest.fixture
def sentinels(memory: Path) -> Iterator[SentinelSet]:
    with SentinelSet(memory / "sentinels") as sentinels:
        yield sentinels


def test_a_run_ends_as_if_its_primary_had_not_been_lost(memory: Path, base_path: Path, sentinels: SentinelSet):
    with ExitStack() as running:
        broker = running.enter_context(start_valkey(memory / "failover-broker", durable=False))
        stack = Stack(memory / "failover", base_path, sentinels.url, broker, sentinels.url, replicas=1)
        running.callback(stack.stop)
        service = running.enter_context(stack.sdk())
        calm, hit = (service.create_lora_training_client(BASE, rank=4, seed=5).result() for _ in range(2))
        undisturbed = train(calm, lambda: None)
        assert train(hit, sentinels.kill_primary) == undisturbed, "each call took effect once"
        assert weights(memory, hit) == weights(memory, calm)
        assert stack.trainer.poll() is None, "no worker was lost"
        heads = [stack.client.hmget(keys.model(each.model_id), "applied", "history") for each in (calm, hit)]
        assert heads[0][0] == heads[1][0], "nothing was lost or doubled"
        assert heads[0][1] != heads[1][1], "there was a new primary"


def train(client: tinker.TrainingClient, between: Callable[[], None]) -> list[float]:
    """Trains pipelined steps and saves the state. Calls `between` while half of the steps are under way, and the first
    of them are done. Returns the losses."""
    steps = [submit(client, seed) for seed in range(HALF)]
    losses = [loss(step) for step in steps[:2]]
    between()
    steps += [submit(client, HALF + seed) for seed in range(HALF)]
    losses += [loss(step) for step in steps[2:]]
    client.save_state("final").result()
    return losses


Step = tuple[tinker.APIFuture[tinker.ForwardBackwardOutput], tinker.APIFuture[tinker.OptimStepResponse]]


def submit(client: tinker.TrainingClient, seed: int) -> Step:
    return client.forward_backward(supervised(seed=seed), "cross_entropy"), client.optim_step(ADAM)


def loss(step: Step) -> float:
    forward, update = step
    update.result()
    return forward.result().metrics["loss:sum"]


def weights(memory: Path, client: tinker.TrainingClient) -> dict[str, bytes]:
    """The tensors of the saved checkpoint, with the optimizer's state."""
    folder = memory / "failover" / "data" / "objects" / "models" / client.model_id / "weights" / "final"
    found = {file.name: file.read_bytes() for file in folder.glob("*/*.safetensors")}
    assert found
    return found

"""The primary of a state server behind sentinels is lost for good while a client trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tinker

from app.stores.redis import keys
from tests.contract.data import ADAM, supervised
from tests.faults.stack import BASE, Stack
from tests.faults.world import await_true
from tests.sentinels import SentinelSet
from tests.servers import start_valkey

HALF = 4
GAP_S = 3


@pytest.fixture
def folder(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


@pytest.fixture
def sentinels(folder: Path) -> Iterator[SentinelSet]:
    with SentinelSet(folder / "sentinels") as sentinels:
        yield sentinels


@pytest.fixture
def broker(folder: Path) -> Iterator[str]:
    with start_valkey(folder / "broker", durable=False) as url:
        yield url


def test_a_run_ends_as_if_its_primary_had_not_been_lost(
    folder: Path, base_path: Path, sentinels: SentinelSet, broker: str
):
    with ExitStack() as running:
        stack = Stack(folder / "stack", base_path, sentinels.url, broker, sentinels.url, replicas=1)
        running.callback(stack.stop)
        service = running.enter_context(stack.sdk())
        calm, hit = (service.create_lora_training_client(BASE, rank=4, seed=5).result() for _ in range(2))
        undisturbed = train(calm, lambda: None)
        assert train(hit, sentinels.kill_primary) == undisturbed, "each call took effect once"
        assert weights(folder, hit) == weights(folder, calm)
        assert stack.trainer.is_alive(), "no worker was lost"
        heads = [stack.client.hmget(keys.model(each.model_id), "applied", "history") for each in (calm, hit)]
        assert heads[0][0] == heads[1][0], "nothing was lost or doubled"
        assert heads[0][1] != heads[1][1], "there was a new primary"


def test_without_replicas_to_wait_for_what_a_promotion_lost_is_reported_and_did_not_happen(
    folder: Path, base_path: Path, sentinels: SentinelSet, broker: str
):
    """The new primary lacks a call that was acknowledged, a step whose results were read, and a checkpoint. On the
    trainer's disk is a snapshot of the lost step."""
    with ExitStack() as running:
        stack = Stack(folder / "stack", base_path, sentinels.url, broker, sentinels.url, replicas=0, gap_s=GAP_S)
        running.callback(stack.stop)
        service = running.enter_context(stack.sdk())
        calm, hit = (service.create_lora_training_client(BASE, rank=4, seed=5).result() for _ in range(2))
        assert [loss(submit(calm, seed)) for seed in (0, 1)] == [loss(submit(hit, seed)) for seed in (0, 1)]
        sentinels.cut_off_replicas()
        assert loss(submit(hit, 2)) > 0
        hit.save_state("final").result()
        stack.trainer.terminate()
        stack.trainer.join(60)
        assert not stack.trainer.is_alive()
        assert int(stack.client.hget(keys.model(hit.model_id), "snapshot_seq")) > 0
        lost = hit.forward_backward(supervised(seed=3), "cross_entropy")
        await_true(lambda: stack.client.zscore(keys.PENDING, hit.model_id), "the call is acknowledged")
        sentinels.kill_primary()
        with pytest.raises(Exception, match=r"future .* does not exist"):
            lost.result()
        trainer = stack.start_trainer()
        for call in submit(hit, 4):
            with pytest.raises(Exception, match="did not arrive"):
                call.result()
        assert loss(submit(hit, 5)) == loss(submit(calm, 5)), "the lost step did not happen"
        for client in (calm, hit):
            client.save_state("final").result()
        assert weights(folder, hit) == weights(folder, calm), "no file of the lost checkpoint is used"
        assert trainer.is_alive(), "no worker was lost"


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


def weights(folder: Path, client: tinker.TrainingClient) -> dict[str, bytes]:
    """The tensors of the saved checkpoint, with the optimizer's state: those of its newest owner."""
    saved = folder / "stack" / "data" / "objects" / "models" / client.model_id / "weights" / "final"
    newest = max(saved.iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    found = {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}
    assert found
    return found

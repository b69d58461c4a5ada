"""Custom losses through journal, runner and backend."""

from __future__ import annotations

import json
from typing import NoReturn

import numpy as np
import pytest
from torch import Tensor

from app.domain.ops import AdamParams, Batch, ForwardBackward, Op, OptimStep, Ragged
from app.errors import Requeue
from app.wire import tinker_pb2 as pb
from tests.custom_losses import DPO_RANKS, dpo, parsed
from tests.unit.workers.conftest import LORA, MODEL, PROBE, World, logprob_bytes, probe
from workers.backends.training.base import Create
from workers.backends.training.losses import custom

LENGTHS = (9, 5, 12)


def pairs(seed: int) -> ForwardBackward:
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(3, 300, size=n) for n in LENGTHS]
    columns = {
        "chosen": [np.arange(n) < n // 2 for n in LENGTHS],
        "rejected": [np.arange(n) >= n // 2 for n in LENGTHS],
        "reference": [np.float32(generator.normal()) for _ in LENGTHS],
    }
    inputs = {name: Ragged.of([np.asarray(array) for array in arrays], np.float32) for name, arrays in columns.items()}
    targets = Ragged.of([np.roll(row, -1) for row in tokens], np.int64)
    batch = Batch(Ragged.of(tokens, np.int32), {"target_tokens": targets, **inputs})
    return ForwardBackward(batch, "custom", custom=parsed(dpo, DPO_RANKS))


def steps(count: int) -> list[Op]:
    return [op for seed in range(count) for op in (pairs(seed), OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8)))]


def test_a_replay_after_a_crash_gives_the_same_bits_from_the_journal_alone(world: World) -> None:
    backend = world.worker("reference/0").backend
    for op in [Create(LORA), *steps(2), PROBE]:
        expected = backend.apply({MODEL: op})[MODEL]
    first = world.worker("a/1")
    for seq, op in enumerate(steps(2), 1):
        world.admit(seq, op)
        if seq < 4:
            first.handle(seq)
    # a/1 died with three seqs applied, and left only the journal.
    successor = world.worker("a/2")
    successor.handle(4, "optim_step")
    assert logprob_bytes(probe(successor, world, 5)) == expected.logprobs.values.tobytes()


def test_a_loss_that_fails_when_run_fails_its_future_alone_and_adds_nothing(world: World) -> None:
    worker = world.worker("a/1")
    broken = pairs(0)
    scale = Ragged.of([np.float32(1), np.float32(1e30), np.float32(1)], np.float32)
    broken = ForwardBackward(
        Batch(broken.batch.tokens, {**broken.batch.inputs, "reference": scale}),
        "custom",
        custom=parsed(overflowing, {"logprobs": 1, "reference": 0}),
    )
    world.admit(1, broken)
    result = worker.handle(1)
    assert result is not None and result.failed
    error = json.loads(result.body)
    assert error["category"] == "user"
    assert "datum 1: the custom loss overflowing fails: node mul_1 (the loss): " in error["error"]
    assert worker.backend.gradients(MODEL) == {}
    world.admit(2, pairs(1))
    assert not worker.handle(2).failed


def test_memory_that_is_short_in_a_loss_fails_its_call_alone_and_no_restore_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Tensor) -> NoReturn:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    worker = world.worker("a/1")
    for seq in (1, 2):
        world.admit(seq, pairs(seq))
    assert not worker.handle(1).failed
    with monkeypatch.context() as memory:
        memory.setitem(custom.FUNCTIONS, "torch._C._nn.log_sigmoid", full)
        result = worker.handle(2)
        assert result.failed and "memory ran out" in json.loads(result.body)["error"]
        worker.owner.discard_all()
        world.admit(3, PROBE)
        with pytest.raises(Requeue, match="cannot be restored now"):
            worker.handle(3)
    worker.retry_backoff.forget(MODEL)
    assert not worker.handle(3).failed


def overflowing(logprobs, reference):
    return logprobs.sum() * (reference * 1e20), {}


def test_metrics_reduce_over_the_datums_as_their_names_say(world: World) -> None:
    worker = world.worker("a/1")
    whole = pairs(3)
    found = metrics(world, worker, 1, whole)
    parts = [metrics(world, worker, 2 + i, one_datum(whole, i)) for i in range(3)]
    mean = sum(part["custom/margin:mean"] for part in parts) / 3
    np.testing.assert_allclose(found["custom/margin:mean"], mean, rtol=1e-5)
    for name in ("custom/right:sum", "loss:sum", "tokens:sum"):
        np.testing.assert_allclose(found[name], sum(part[name] for part in parts), rtol=1e-5)


def one_datum(op: ForwardBackward, i: int) -> ForwardBackward:
    def cut(column: Ragged) -> Ragged:
        array = list(column)[i]
        return Ragged.of([array], array.dtype)

    inputs = {name: cut(column) for name, column in op.batch.inputs.items()}
    return ForwardBackward(Batch(cut(op.batch.tokens), inputs), "custom", custom=op.custom, forward_only=True)


def metrics(world, worker, seq, op) -> dict[str, float]:
    world.admit(seq, op)
    return dict(pb.ForwardBackwardOutput.FromString(worker.handle(seq).body).metrics)

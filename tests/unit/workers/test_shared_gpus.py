"""A trainer and a sampler that share GPUs serve calls in turns: as production assembles them, around real backends.

The device is a stand-in that counts who is at work on it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from app import ids
from app.domain import ops
from app.domain.records import Sampler
from app.domain.sampling import SampleRequest
from app.errors import Requeue
from app.settings import BaseModelSettings
from app.stores.redis import keys
from app.stores.redis.records import dump
from app.wire import tinker_pb2 as pb
from tests import assembly
from tests.unit.workers.conftest import (
    BASE,
    MODEL,
    World,
    add_model,
    await_true,
    logprob_bytes,
    probe,
    step,
    undisturbed,
)
from tests.unit.workers.train.saves import OTHER, SAVE, Dispatch, GatedStore, admit, applied, dispatch, store
from workers.backends.sampling.backends import create
from workers.backends.sampling.base import SamplerBackend
from workers.backends.training import backends as training
from workers.process.gpu_turns import GpuTurns, SamplerInTurns, TrainerInTurns
from workers.sample.admission import BatchAdmission
from workers.sample.runner import SampleRunner
from workers.train import scheduler

__all__ = ["dispatch", "store"]  # the fixtures
SESSION = "session:sample:0"
REQUEST = SampleRequest(np.array([5, 6, 7], dtype=np.int32), num_samples=2, max_tokens=4, seed=3, ignore_eos=True)
STEPS = 12
_FOREVER_S = 60.0


@dataclass
class Device:
    """Records overlaps of a trainer's and a sampler's work, and each change from one to the other."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    at_work: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    overlaps: int = 0

    @contextmanager
    def used_by(self, name: str) -> Iterator[None]:
        with self.lock:
            self.overlaps += any(self.at_work[other] for other in self.at_work if other != name)
            self.at_work[name] += 1
            if self.order[-1:] != [name]:
                self.order.append(name)
        try:
            yield
        finally:
            with self.lock:
                self.at_work[name] -= 1


@dataclass
class OnDevice:
    """A backend that uses the device in some of its methods. As a sampler it is asleep between `sleep` and `wake`."""

    backend: Any
    name: str
    device: Device
    using: frozenset[str]
    asleep: bool = False
    freed: int = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.backend, name)
        return self._watched(method) if name in self.using else method

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self.device.used_by(self.name):
                assert not self.asleep
                return method(*args, **named)

        return call

    def sleep(self) -> None:
        with self.device.used_by(self.name):
            self.asleep = True

    def wake(self) -> None:
        with self.device.used_by(self.name):
            self.asleep = False

    def free_memory(self) -> None:
        with self.device.used_by(self.name):
            self.freed += 1


@dataclass
class Shared:
    """A trainer and a sampler on one device."""

    world: World
    file: Path
    device: Device
    trainer: TrainerInTurns
    sampler: SamplerInTurns
    runner: SampleRunner

    def admit_sample(self, seq: int) -> str:
        payload = ops.encode(REQUEST)
        queue = f"sample.{BASE}"
        return self.world.oplog.admit_sample(
            f"{SESSION}:{seq}", SESSION, "me", queue, payload, ops.digest(payload), sequences=2
        ).request_id

    def sample(self, seq: int) -> tuple[bytes, ...]:
        """The tokens of each sequence."""
        result = self.runner.handle(self.admit_sample(seq), SESSION, "sample")
        assert result is not None and not result.failed
        return tuple(sequence.tokens for sequence in pb.SampleResponse.FromString(result.body).sequences)


@pytest.fixture(scope="module")
def engine(base: BaseModelSettings) -> Iterator[SamplerBackend]:
    backend = create(base.model_copy(update={"sampler": base.sampler.model_copy(update={"backend": "transformers"})}))
    backend.open()
    yield backend
    backend.close()


@pytest.fixture
def shared(world: World, engine: SamplerBackend, base: BaseModelSettings, tmp_path: Path) -> Iterator[Shared]:
    file, device = tmp_path / "turns", Device()
    plain = training.create(base)
    plain.open()
    trainer = TrainerInTurns(OnDevice(plain, "trainer", device, frozenset({"apply", "export"})), file, 60.0, 0.0)
    on_device: Any = OnDevice(engine, "sampler", device, frozenset({"sample", "load", "evict"}))
    sampler = SamplerInTurns(on_device, file, 60.0, 0.0)
    world.records.put("samplers", SESSION, dump(Sampler("me", "session", BASE, 0.0)))
    assembled = assembly.sampler(
        world.client, world.url, world.folder, world.oplog, sampler, "s/1", turns=sampler.turns
    )
    world.samplers.append(assembled)
    world.backends["shared"] = trainer
    yield Shared(world, file, device, trainer, sampler, assembled.runner)
    del world.backends["shared"]
    trainer.turns.close()
    sampler.turns.close()


def test_passes_and_samples_alternate_without_an_overlap_and_change_no_bit(shared: Shared) -> None:
    world, device, on_device = shared.world, shared.device, cast(OnDevice, shared.trainer._backend)
    alone = shared.sample(0)
    worker = world.worker("shared/1", turns=shared.trainer.turns)
    calls = [op for seed in range(STEPS) for op in step(seed)]
    ended = threading.Event()

    def sample_on(first: int) -> list[tuple[bytes, ...]]:
        found: list[tuple[bytes, ...]] = []
        while not ended.is_set():
            found.append(shared.sample(first + len(found)))
        return found

    with ThreadPoolExecutor(3) as pool:
        sampling = [pool.submit(sample_on, 1_000_000 * (at + 1)) for at in range(3)]
        try:
            for seq, op in enumerate(calls, 1):
                await_true(lambda: device.order[-1] == "sampler", "the sampler has a turn between two calls")
                world.admit(seq, op)
                result = worker.handle(seq, op.kind)
                assert result is not None and not result.failed
        finally:
            ended.set()
    samples = [tokens for each in sampling for tokens in each.result(_FOREVER_S)]
    assert device.overlaps == 0
    assert on_device.freed >= device.order.count("trainer") - 1
    assert device.order.count("trainer") >= len(calls)
    assert samples and set(samples) == {alone}
    assert logprob_bytes(probe(worker, world, len(calls) + 1)) == undisturbed(world, list(range(STEPS)))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[GpuTurns]:
    """The turns of a third process on the same device."""
    turns = GpuTurns(tmp_path / "turns", lambda: None, lambda: None, 60.0, 0.0)
    yield turns
    turns.close()


def test_a_training_call_does_not_begin_before_its_turn(shared: Shared, elsewhere: GpuTurns) -> None:
    world, worker = shared.world, shared.world.worker("shared/1", turns=shared.trainer.turns)
    assert worker.handle(0, "create_model") is not None
    world.admit(1, step()[0])
    op = keys.op(ids.request_id(MODEL, 1))
    before = world.client.hgetall(op)
    with ThreadPoolExecutor(1) as pool:
        with elsewhere.use():
            running = pool.submit(worker.handle, 1)
            await_true(lambda: shared.trainer.turns._waiting, "the call waits for its turn")
            assert world.client.hgetall(op) == before
            assert worker.watchdog.healthy()
        assert running.result(_FOREVER_S) is not None
    assert world.client.hgetall(op) != before


def test_a_restore_does_not_begin_before_its_turn(shared: Shared, elsewhere: GpuTurns) -> None:
    world, worker = shared.world, shared.world.worker("shared/1", turns=shared.trainer.turns)
    assert worker.handle(0, "create_model") is not None
    world.admit(1, step()[0])
    worker.drain.release()
    worker = world.worker("shared/2", turns=shared.trainer.turns)

    def records() -> list[dict[bytes, bytes]]:
        restore = [key for key in world.client.keys() if b"restore" in key]  # noqa: SIM118
        found = [keys.op(ids.request_id(MODEL, 1)), keys.model(MODEL), *restore]
        return [world.client.hgetall(key) for key in found]

    before = records()
    with ThreadPoolExecutor(1) as pool:
        with elsewhere.use():
            running = pool.submit(worker.handle, 1)
            await_true(lambda: shared.trainer.turns._waiting, "the restore waits for its turn")
            assert records() == before
            assert not worker.parts.keeper.holds(MODEL)
        assert running.result(_FOREVER_S) is not None


def test_a_save_is_committed_while_another_call_waits_for_its_turn(
    shared: Shared, elsewhere: GpuTurns, store: GatedStore, dispatch: Dispatch
) -> None:
    world = shared.world
    worker = world.worker("shared/1", turns=shared.trainer.turns, store=store)
    add_model(world, OTHER)
    for model_id in (MODEL, OTHER):
        dispatch(worker, 0, "create_model", model_id).result(_FOREVER_S)
    admit(world, *step(0), *step(1))
    dispatch(worker, 1, "forward_backward").result(_FOREVER_S)
    admit(world, SAVE, model_id=OTHER)
    dispatch(worker, 2, "optim_step").result(_FOREVER_S)
    assert store.asked.wait(_FOREVER_S)
    with elsewhere.use():
        waiting = dispatch(worker, 3, "forward_backward")
        await_true(lambda: shared.trainer.turns._waiting, "the call waits for its turn")
        store.open.set()
        await_true(lambda: applied(world, OTHER) == 1, "the save is committed")
        assert applied(world) == 2
    assert waiting.result(_FOREVER_S) is not None


def test_a_call_that_waits_for_its_turn_goes_to_another_worker_when_this_one_ends(
    shared: Shared, elsewhere: GpuTurns
) -> None:
    worker = shared.world.worker("shared/1", turns=shared.trainer.turns)
    assert worker.handle(0, "create_model") is not None
    shared.world.admit(1, step()[0])
    with ThreadPoolExecutor(1) as pool, elsewhere.use():
        running = pool.submit(worker.handle, 1)
        await_true(lambda: shared.trainer.turns._waiting, "the call waits for its turn")
        worker.runner.leave()
        with pytest.raises(Requeue):
            running.result(_FOREVER_S)


def test_a_call_that_waits_to_restore_its_model_is_dispatched_again_when_this_worker_ends(
    shared: Shared, elsewhere: GpuTurns
) -> None:
    worker = shared.world.worker("shared/1", turns=shared.trainer.turns)
    with ThreadPoolExecutor(1) as pool, elsewhere.use():
        running = pool.submit(worker.handle, 0, "create_model")
        await_true(lambda: shared.trainer.turns._waiting, "the restore waits for its turn")
        worker.runner.leave()
        with pytest.raises(Requeue):
            running.result(_FOREVER_S)
    assert [kind for kind, *_ in worker.dispatched] == ["create_model"]


def test_a_call_behind_one_that_is_missing_waits_for_no_turn(shared: Shared, elsewhere: GpuTurns) -> None:
    worker = shared.world.worker("shared/1", turns=shared.trainer.turns)
    assert worker.handle(0, "create_model") is not None
    shared.world.admit(2, step()[1])
    worker.runner.leave()  # otherwise a call that waits in vain would wait for ever
    with elsewhere.use(), pytest.raises(Requeue, match=r"seq 1 of .* has not arrived"):
        worker.handle(2, "optim_step")


def test_a_trainers_idle_time_covers_the_pause_that_the_scheduler_expects(shared: Shared) -> None:
    assert shared.trainer.turns._idle_s >= scheduler._RECENT_S
    assert shared.sampler.turns._idle_s < scheduler._RECENT_S


def test_a_capture_in_the_samplers_turn_keeps_no_memory_of_the_gpu(shared: Shared, elsewhere: GpuTurns) -> None:
    worker, on_device = (
        shared.world.worker("shared/1", turns=shared.trainer.turns),
        cast(OnDevice, shared.trainer._backend),
    )
    assert worker.handle(0, "create_model") is not None
    with elsewhere.use():
        freed = on_device.freed
        shared.trainer.capture(MODEL, optimizer=True)
        assert on_device.freed == freed + 1


def test_a_trainer_that_failed_and_may_have_freed_nothing_keeps_its_turn(
    shared: Shared, elsewhere: GpuTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.trainer.turns.use():
        monkeypatch.setattr(shared.trainer._backend, "healthy", lambda: False, raising=False)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_use, elsewhere)
        await_true(lambda: running.done() or not shared.trainer.turns.healthy(), "its process ends")
        assert not running.done()
        os.close(shared.trainer.turns._turn)  # as the kernel does when the process ends
        running.result(_FOREVER_S)


def test_a_sample_that_waits_for_its_turn_has_no_usage_yet(
    shared: Shared, elsewhere: GpuTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles, slot = [], BatchAdmission.slot
    monkeypatch.setattr(BatchAdmission, "slot", lambda *args: handles.append(args[-1]) or slot(*args))
    with ThreadPoolExecutor(1) as pool:
        with elsewhere.use():
            running = pool.submit(shared.sample, 0)
            await_true(lambda: shared.sampler.turns._waiting, "the request waits for its turn")
            assert shared.runner._device_clock._sequences == 0
            assert [handle.prompt_tokens for handle in handles] == [0]
            assert shared.sampler.healthy()
        assert running.result(_FOREVER_S)
    assert handles[0].prompt_tokens > 0


def _use(turns: GpuTurns) -> None:
    with turns.use():
        pass

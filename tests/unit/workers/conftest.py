from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import redis

from app import ids
from app.domain import ops
from app.domain.ops import AdamParams, Batch, CreateModel, ForwardBackward, LoraSpec, ModelSpec, Op, OptimStep, Ragged
from app.domain.records import Model
from app.domain.results import ForwardBackwardOutput
from app.settings import BaseModelSettings, EngineSettings, Settings
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.wire import tinker_pb2 as pb
from tests import assembly
from tests.models import tiny_qwen3
from workers.backends.training.backends import create
from workers.backends.training.base import Create, TrainingBackend
from workers.checkpoints import transfer
from workers.checkpoints.coalescing import CoalescingWorker
from workers.process.gpu_turns import GpuTurns
from workers.process.parts import Serving
from workers.sample.assembly import AssembledSampler
from workers.train.assembly import AssembledTrainer, Overrides, assemble_trainer

BASE = "base"
MODEL = "session:train:0"
LORA = LoraSpec(rank=4, seed=3)
# No lease expires and no snapshot is due because a machine stood still: tests control both.
HOUR_S = 3600.0


def batch(seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(3, 300, size=9 + i) for i in range(2)]
    targets = [np.roll(row, -1) for row in tokens]
    return Batch(Ragged.of(tokens, np.int32), {"target_tokens": Ragged.of(targets, np.int64)})


def step(seed: int = 0) -> list[Op]:
    return [ForwardBackward(batch(seed), "cross_entropy"), OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pauses between tries to fetch a file: 0.6 s for each fetch from a store that is away."""
    monkeypatch.setattr(transfer, "_PAUSE_S", 0.0)


def stop(sampler: AssembledSampler) -> None:
    """Ends the sampler's threads. Its backend may be another test's too."""
    sampler.cancellations.close()
    sampler.parts.keeper.stop()


def await_true(what: Callable[[], Any], why: str) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, f"in vain for 60 s: {why}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Worker(AssembledTrainer):
    """One trainer, dispatched by hand. `dispatched` records (kind, request id, queue)."""

    dispatched: list[tuple[str, str, str]]

    @property
    def backend(self) -> TrainingBackend:
        return self.serving.backend

    def handle(self, seq: int, kind: str = "forward_backward"):
        return self.runner.handle(ids.request_id(MODEL, seq), MODEL, kind)


@dataclass
class World:
    """Shared state of several workers of one base model. Models belong to project "me" by default."""

    client: redis.Redis
    url: str
    folder: Path
    base: BaseModelSettings
    settings: EngineSettings
    oplog: RedisOpLog
    records: RedisRecords
    backends: dict[str, TrainingBackend]
    samplers: list[AssembledSampler] = field(default_factory=list)
    trainers: list[AssembledTrainer] = field(default_factory=list)

    def admit(self, seq: int, op: Op) -> str:
        payload = ops.encode(op)
        return self.oplog.admit(MODEL, seq, op.kind, payload, ops.digest(payload)).request_id

    def head(self) -> dict[bytes, bytes]:
        return self.client.hgetall(keys.model(MODEL))

    def outlast(self, request_id: str) -> None:
        """Every missing worker that began the Op has been missing for the time of a lease."""
        self._outlast(keys.op(request_id))

    def outlast_restore(self) -> None:
        """Every missing worker that began to restore the model has been missing for the time of a lease."""
        self._outlast(f"tinsmith:restore:{MODEL}")

    def _outlast(self, key: str) -> None:
        former = json.loads(self.client.hget(key, "former") or "{}")
        former = {worker: min(since, 1) for worker, since in former.items()}
        self.client.hset(key, "former", json.dumps(former))

    def await_snapshot(self, seq: int) -> None:
        """Waits until the durable snapshot is at `seq`."""
        await_true(lambda: int(self.head()[b"snapshot_seq"]) == seq, f"no durable snapshot at {seq}")

    def worker(
        self,
        name: str,
        share: float = 0.02,
        most: int = 64,
        store: ObjectStore | None = None,
        merged_tokens: int = 0,
        wait_s: float = 0.0,
        turns: GpuTurns | None = None,
        **engine: Any,
    ) -> Worker:
        """Makes a worker, without any model in its backend.

        Nodes keep their backend, because a second load of the base model adds nothing. A `share` of 1 or
        more makes a snapshot after every step. `turns` are those of the node's GPUs. `engine` overrides the engine's
        settings.
        """
        node = name.partition("/")[0]
        if node not in self.backends:
            self.backends[node] = create(self.base)
            self.backends[node].open()
        backend = self.backends[node]
        backend.close(MODEL)
        every_step = {"journal_bytes": 0} if share >= 1 else {}
        engine = {"handover_dir": str(self.folder / "handover" / node), "snapshot_share": share, **every_step, **engine}
        settings = Settings(data_dir=self.folder / node, engine=self.settings.model_copy(update=engine))
        passes = {"exact": not merged_tokens, "merged_tokens": merged_tokens, "merge_wait_s": wait_s}
        trainer = self.base.trainer.model_copy(update={"max_models": most, **passes})
        dispatched: list[tuple[str, str, str]] = []

        def send(kind: str, request_id: str, parent: str, queue: str) -> None:
            dispatched.append((kind, request_id, queue))

        store = store or FolderStore(self.folder / "objects", "secret", "http://x")
        parts = assembly.parts(self.client, settings, name, self.oplog, store, send)
        base = self.base.model_copy(update={"trainer": trainer})
        serving = Serving(base, backend, assembly.INFO, f"train.{BASE}", turns=turns)
        overrides = Overrides(
            _end, make_worker=partial(CoalescingWorker, retry_s=0.1), rest_s=HOUR_S, scan_share=math.inf
        )
        self.trainers.append(assemble_trainer(parts, serving, overrides))
        return Worker(**vars(self.trainers[-1]), dispatched=dispatched)


class Ended(BaseException):
    """The worker ended its process."""


def _end(why: str) -> NoReturn:
    raise Ended(why)


PROBE = ForwardBackward(batch(99), "cross_entropy", forward_only=True)


def probe(worker: Worker, world: World, seq: int) -> bytes:
    """Logprobs of a fixed batch: equal bytes mean an equal model."""
    world.admit(seq, PROBE)
    result = worker.handle(seq)
    assert result is not None
    return result.body


def undisturbed(world: World, seeds: list[int]) -> bytes:
    """Result of an undisturbed run of these steps."""
    backend = world.worker("reference/0").backend
    output = None
    for op in [Create(LORA), *(op for seed in seeds for op in step(seed)), PROBE]:
        output = backend.apply({MODEL: op})[MODEL]
    assert isinstance(output, ForwardBackwardOutput)
    return output.logprobs.values.tobytes()


def logprob_bytes(body: bytes) -> bytes:
    output = pb.ForwardBackwardOutput.FromString(body)
    return output.loss_fn_outputs[0].fields["logprobs"].data


def add_model(world: World, model_id: str, project: str = "me") -> None:
    """Adds a model without an owner, with its creation waiting."""
    world.oplog.create_model(model_id, dump(Model(project, "session", BASE, 0.0)))
    payload = ops.encode(CreateModel(ModelSpec(BASE, LORA)))
    world.oplog.admit(model_id, 0, CreateModel.kind, payload, ops.digest(payload))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelSettings:
    path = tiny_qwen3(tmp_path_factory.mktemp("tiny"))
    return BaseModelSettings.model_validate(
        {"name": BASE, "path": str(path), "dtype": "float32", "trainer": {"backend": "torch"}}
    )


@pytest.fixture(scope="session")
def backends() -> dict[str, TrainingBackend]:
    return {}


@pytest.fixture
def world(
    client: redis.Redis, valkey: str, tmp_path: Path, base: BaseModelSettings, backends: dict[str, TrainingBackend]
) -> Iterator[World]:
    settings = EngineSettings(lease_s=HOUR_S)
    oplog = RedisOpLog(client, settings)
    oplog.create_model(MODEL, dump(Model("me", "session", BASE, 0.0)))
    world = World(client, valkey, tmp_path, base, settings, oplog, RedisRecords(client), backends)
    world.admit(0, CreateModel(ModelSpec(BASE, LORA)))
    yield world
    for trainer in world.trainers:
        trainer.shm_transfers.close()
        trainer.snapshots.close()
        trainer.parts.keeper.stop()
    for sampler in world.samplers:
        stop(sampler)
    # The calls above do not wait for these threads: they must end before the next test has models of the same names.
    for thread in threading.enumerate():
        if thread.name in ("shm-uploads", "snapshot-writes", "snapshot-uploads"):
            thread.join(60)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import redis

from app import ids
from app.domain import codec
from app.domain.batch import Batch, Ragged
from app.domain.ops import AdamParams, CreateModel, ForwardBackward, LoraSpec, ModelSpec, Op, OptimStep
from app.domain.records import Model, dump
from app.settings import BaseModelSettings, EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis.oplog import RedisOpLog
from app.stores.redis.records import RedisRecords
from tests.models import tiny_qwen3
from workers.executor import Executor
from workers.leases import LeaseKeeper
from workers.owner import Owner
from workers.runner import TrainingRunner
from workers.saving import Saver
from workers.snapshot import Restore, Snapshots
from workers.training.base import TrainingBackend
from workers.training.factory import create

BASE = "base"
MODEL = "session:train:0"
LORA = LoraSpec(rank=4, seed=3)


def batch(seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(3, 300, size=9 + i) for i in range(2)]
    targets = [np.roll(row, -1) for row in tokens]
    return Batch(Ragged.of(tokens, np.int32), {"target_tokens": Ragged.of(targets, np.int64)})


def step(seed: int = 0) -> list[Op]:
    return [ForwardBackward(batch(seed), "cross_entropy"), OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))]


@dataclass
class Worker:
    """One trainer as the runtime puts it together, rung by hand. `rung` records (kind, request id, queue)."""

    runner: TrainingRunner
    owner: Owner
    oplog: RedisOpLog
    backend: TrainingBackend
    keeper: LeaseKeeper
    rung: list[tuple[str, str, str]] = field(default_factory=list)

    def handle(self, seq: int, kind: str = "forward_backward"):
        return self.runner.handle(ids.request_id(MODEL, seq), MODEL, kind)


@dataclass
class World:
    """The shared state of several workers of one base."""

    client: redis.Redis
    folder: Path
    base: BaseModelSettings
    settings: EngineSettings
    oplog: RedisOpLog
    records: RedisRecords
    backends: dict[str, TrainingBackend]
    keepers: list[LeaseKeeper] = field(default_factory=list)

    def admit(self, seq: int, op: Op) -> str:
        payload = codec.encode(op)
        return self.oplog.admit(MODEL, seq, op.kind, payload, codec.digest(payload)).request_id

    def worker(self, name: str, share: float = 0.02) -> Worker:
        """Nodes keep their backend (loading a base again adds nothing), without any model in it."""
        node = name.partition("/")[0]
        if node not in self.backends:
            self.backends[node] = create(self.base)
            self.backends[node].open()
        backend = self.backends[node]
        backend.close(MODEL)
        keeper = LeaseKeeper(self.oplog, name, self.settings.lease_s)
        self.keepers.append(keeper)
        store = FolderStore(self.folder / "objects", "secret", "http://x")
        saver = Saver(backend, self.records, store)
        executor = Executor(backend, store, self.folder / "cache" / node, saver)
        owner = Owner(self.oplog, backend, keeper, name, Restore(self.oplog, executor))
        rung: list[tuple[str, str, str]] = []
        runner = TrainingRunner(
            self.oplog,
            owner,
            executor,
            Snapshots(self.oplog, saver, share, first_s=0.0 if share >= 1 else 30.0),
            lambda kind, request_id, parent, queue: rung.append((kind, request_id, queue)),
            f"train.{BASE}",
            node,
        )
        return Worker(runner, owner, self.oplog, backend, keeper, rung)


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
    client: redis.Redis, tmp_path: Path, base: BaseModelSettings, backends: dict[str, TrainingBackend]
) -> Iterator[World]:
    settings = EngineSettings(lease_s=2.0)
    oplog = RedisOpLog(client, settings)
    oplog.create_model(MODEL, dump(Model("me", "session", BASE, 0.0)))
    world = World(client, tmp_path, base, settings, oplog, RedisRecords(client), backends)
    world.admit(0, CreateModel(ModelSpec(BASE, LORA)))
    yield world
    for keeper in world.keepers:
        keeper.stop()

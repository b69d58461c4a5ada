"""Several workers of a few models: the product's own runner, owner, executor and snapshots.

They use a real server, a real folder store and a backend of three numbers. Every call to the outside is watched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from unittest import mock

import redis

from app import ids
from app.domain import codec
from app.domain.ops import CreateModel, LoraSpec, ModelSpec, Op, as_asked
from app.domain.records import Model, dump
from app.domain.results import Result
from app.errors import Fenced
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from tests.property.background import Background
from tests.property.faults import Crash, Fault, Faults
from tests.property.vector_backend import VectorBackend
from workers.checkpoints.shm_transfer import HandoverFolder, Handovers
from workers.checkpoints.snapshot_upload import SnapshotFolder
from workers.checkpoints.snapshots import Restore, Snapshots
from workers.checkpoints.writer import Saver
from workers.process.fair_queue import Shares
from workers.process.leases import LeaseKeeper
from workers.process.results import NotNow
from workers.train.committer import Committer
from workers.train.executor import Executor
from workers.train.owner import Owner, Resident
from workers.train.rebalance import Drain
from workers.train.runner import TrainingRunner
from workers.train.scheduler import Ahead, Parked, Turns, Unowned

BASE = "base"
MODEL = "session:train:0"
CREATE = CreateModel(ModelSpec(BASE, LoraSpec(rank=4, seed=3)))
# No lease expires and no renewal happens by itself: a machine decides, or its runs could not be repeated.
_LEASE_S = 3600.0


@dataclass
class Trainer:
    """One process. `rung` lists its dispatches: (request id, queue)."""

    name: str
    runner: TrainingRunner
    owner: Owner
    drain: Drain
    backend: VectorBackend
    keeper: LeaseKeeper
    background: Background
    faults: Faults
    handovers: Handovers
    rung: list[tuple[str, str]]

    def ring(self, seq: int, kind: str = "forward_backward", model: str = MODEL) -> Result | None:
        """Outcome of a dispatch; None if there is no result, and the call is dispatched again.

        Fenced comes from a restore that was overtaken by another owner's snapshot.
        """
        with contextlib.suppress(NotNow, redis.RedisError, Fenced, Crash):
            return self.runner.handle(ids.request_id(model, seq), model, kind)
        return None

    def discard_incomplete(self) -> None:
        """Removes lost transfers, as a watchdog tick does."""
        for model in self.handovers.lost():
            self.owner.discard(model)

    def wipe(self) -> None:
        """Loses the memory of its machine."""
        shutil.rmtree(self.handovers._folder.root, ignore_errors=True)


@dataclass
class TrainerWorld:
    """Shared servers of all workers.

    With `noise` every run of a batch gives different gradients. Up to `merged_tokens` of other models share a pass.
    `done` counts the "shared" passes, the Ops that were committed after a save that they ran "ahead" of, and the
    transfers that had to be "made again".
    """

    client: redis.Redis
    folder: Path
    noise: random.Random | None = None
    models: tuple[str, ...] = (MODEL,)
    merged_tokens: int = 0
    hit: Counter[Fault] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    keepers: list[LeaseKeeper] = field(default_factory=list)
    boots: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def __post_init__(self) -> None:
        self.client.flushall()
        self.settings = EngineSettings(lease_s=_LEASE_S)
        self.oplog = RedisOpLog(self.client, self.settings)
        self.records = RedisRecords(self.client)
        self.store: ObjectStore = FolderStore(self.folder / "objects", "secret", "http://x")
        for model in self.models:
            self.oplog.create_model(model, dump(Model("me", "session", BASE, 0.0)))

    def admit(self, seq: int, op: Op, model: str = MODEL) -> bool:
        payload = codec.encode(op)
        return self.oplog.admit(model, seq, op.kind, payload, codec.digest(codec.encode(as_asked(op)))).fresh

    def trainer(self, node: str, *, snapshots: bool = True, fragile: bool = False) -> Trainer:
        """A new process of a node, with a snapshot after every optim_step, or none. Node b has its own machine."""
        name = f"{node}/{self.boots()}"
        backend, faults = VectorBackend(self.noise, fragile, done=self.done), Faults(self.hit)

        def writes(model_id: str) -> None:
            resident = owner.residents().get(model_id)
            self.done["ahead"] += max(0, len(resident.uncommitted) - 1) if resident else 0

        background = Background(writes)
        oplog, store = faults.watch("oplog", self.oplog), faults.watch("store", self.store)
        watched_backend = faults.watch("backend", backend)
        keeper = LeaseKeeper(self.oplog, name, _LEASE_S)
        self.keepers.append(keeper)
        machine = self.folder / ("machine b" if node == "b" else "machine a")
        with mock.patch("workers.checkpoints.shm_transfer.Latest", background.latest):
            handovers = Handovers(store, self.records, HandoverFolder(machine / "handover", 2**30))
        make_again = handovers.resume

        def resume(model_id: str) -> dict[int, str]:
            to_make = make_again(model_id)
            self.done["made again"] += len(to_make)
            return to_make

        handovers.resume = resume  # type: ignore[method-assign]
        saver = Saver(watched_backend, self.records, store, handovers)
        executor = Executor(watched_backend, store, self.folder / "cache" / name, saver)
        folder = SnapshotFolder(machine / "snapshots", node)
        engine = self.settings.model_copy(update={"snapshot_share": math.inf})
        with mock.patch("workers.checkpoints.snapshot_upload.Latest", background.latest):
            snapshots_of = Snapshots(oplog, saver, folder, engine, rest_s=0.0 if snapshots else math.inf)
        rung: list[tuple[str, str]] = []

        def ring(kind: str, request_id: str, parent_id: str, queue: str) -> None:
            rung.append((request_id, queue))

        def settle(resident: Resident, seconds: float) -> None:
            committer.finish(resident, seconds)
            handovers.finish(resident.lease.model_id, seconds)
            snapshots_of.settle(resident, within_s=seconds)

        def end(why: str) -> NoReturn:
            drain.hand_over()
            faults.dead = True
            raise Crash

        restore = Restore(oplog, executor, folder, snapshots_of)
        owner = Owner(oplog, watched_backend, keeper, name, restore, settle, 64, lost=handovers.give_up)
        queue = f"train.{BASE}"
        drain = Drain(oplog, owner, ring, queue)
        parked = Parked(ring, f"{queue}@{node}")
        saves = background.saves
        committer = Committer(oplog, owner, executor, snapshots_of, saves)
        unowned = Unowned(oplog, queue, math.inf)
        turns = Turns(oplog, owner, Ahead(saves, parked), Shares(), unowned, self.merged_tokens, wait_s=0.0)
        runner = TrainingRunner(
            oplog, owner, committer, watched_backend.healthy, parked, turns, saves, ring, queue, end
        )
        return Trainer(name, runner, owner, drain, backend, keeper, background, faults, handovers, rung)

    def lapse(self) -> None:
        """Expires the leases of owners that slept, which do not notice."""
        self.client.delete(*map(keys.lease, self.models))

    def outlast(self) -> None:
        """Every missing worker has been missing for the time of a lease."""
        for key in self.client.scan_iter(keys.op("*")):
            missed = json.loads(self.client.hget(key, "former") or "{}")
            self.client.hset(key, "former", json.dumps({worker: min(since, 1) for worker, since in missed.items()}))

    def applied(self, model: str = MODEL) -> int:
        return int(self.client.hget(keys.model(model), "applied") or -1)

    def result(self, seq: int, model: str = MODEL) -> Result | None:
        return self.oplog.outcome(ids.request_id(model, seq))

    def stop(self) -> None:
        for keeper in self.keepers:
            keeper.stop()

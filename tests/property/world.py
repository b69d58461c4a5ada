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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import redis

from app import ids
from app.domain import ops
from app.domain.ops import CreateModel, LoraSpec, ModelSpec, Op, as_asked
from app.domain.records import Model
from app.domain.results import Result
from app.errors import Fenced, Requeue
from app.settings import BaseModelSettings, EngineSettings, Settings
from app.stores.objects.base import ObjectStore
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from tests import assembly
from tests.property.background import Background
from tests.property.faults import Crash, Fault, Faults
from tests.property.vector_backend import VectorBackend
from workers.process.liveness import LeaseKeeper
from workers.process.parts import Serving
from workers.train.assembly import AssembledTrainer, Overrides, assemble_trainer

BASE = "base"
MODEL = "session:train:0"
CREATE = CreateModel(ModelSpec(BASE, LoraSpec(rank=4, seed=3)))
# No lease expires and no renewal happens by itself: a machine decides, or its runs could not be repeated.
_LEASE_S = 3600.0


@dataclass(frozen=True)
class Process(AssembledTrainer):
    """One trainer. `backend` is its own, beneath the faults. `dispatched` lists the requests that it dispatched."""

    backend: VectorBackend
    background: Background
    faults: Faults
    dispatched: list[str]

    def send(self, seq: int, kind: str = "forward_backward", model: str = MODEL) -> Result | None:
        """Outcome of a dispatch; None if there is no result, and the call is dispatched again.

        Fenced comes from a restore that was overtaken by another owner's snapshot.
        """
        with contextlib.suppress(Requeue, redis.RedisError, Fenced, Crash):
            return self.runner.handle(ids.request_id(model, seq), model, kind)
        return None

    def wipe(self) -> None:
        """Loses the memory of its machine."""
        shutil.rmtree(self.parts.settings.handover_dir, ignore_errors=True)


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
        passes = {"exact": not self.merged_tokens, "merged_tokens": max(1, self.merged_tokens), "merge_wait_s": 0.0}
        self.base = BaseModelSettings.model_validate({"name": BASE, "path": "vectors", "trainer": passes})
        self.oplog = RedisOpLog(self.client, self.settings)
        self.records = RedisRecords(self.client)
        self.store: ObjectStore = FolderStore(self.folder / "objects", "secret", "http://x")
        for model in self.models:
            self.oplog.create_model(model, dump(Model("me", "session", BASE, 0.0)))

    def admit(self, seq: int, op: Op, model: str = MODEL) -> bool:
        payload = ops.encode(op)
        return self.oplog.admit(model, seq, op.kind, payload, ops.digest(ops.encode(as_asked(op)))).fresh

    def trainer(self, node: str, *, snapshots: bool = True, fragile: bool = False) -> Process:
        """A new process of a node, with a snapshot after every optim_step, or none. Node b has its own machine."""
        backend, faults = VectorBackend(self.noise, fragile, done=self.done), Faults(self.hit)

        def writes(model_id: str) -> None:
            resident = trainer.owner.resident(model_id)
            self.done["ahead"] += max(0, len(resident.uncommitted) - 1) if resident else 0

        def end(why: str) -> NoReturn:
            faults.dead = True
            raise Crash

        dispatched: list[str] = []

        def send(kind: str, request_id: str, parent_id: str, queue: str) -> None:
            dispatched.append(request_id)

        background = Background(writes)
        machine = self.folder / ("machine b" if node == "b" else "machine a")
        engine = {"snapshot_share": math.inf, "handover_dir": str(machine / "handover")}
        settings = Settings(data_dir=machine, engine=self.settings.model_copy(update=engine))
        parts = assembly.parts(self.client, settings, f"{node}/{self.boots()}", self.oplog, self.store, send)
        self.keepers.append(parts.keeper)
        parts = replace(parts, oplog=faults.proxy("oplog", parts.oplog), store=faults.proxy("store", parts.store))
        serving = Serving(self.base, faults.proxy("backend", backend), assembly.INFO, f"train.{BASE}")
        rest_s = 0.0 if snapshots else math.inf
        overrides = Overrides(
            end, lambda: background.background_saves, background.coalescing_worker, rest_s, scan_share=math.inf
        )
        trainer = assemble_trainer(parts, serving, overrides)
        make_again = trainer.shm_transfers.resume

        def resume(model_id: str) -> dict[int, str]:
            to_make = make_again(model_id)
            self.done["made again"] += len(to_make)
            return to_make

        trainer.shm_transfers.resume = resume  # type: ignore[method-assign]
        return Process(**vars(trainer), backend=backend, background=background, faults=faults, dispatched=dispatched)

    def lapse(self) -> None:
        """Expires the leases of owners that slept, which do not notice."""
        self.client.delete(*map(keys.lease, self.models))

    def outlast(self) -> None:
        """Every missing worker has been missing for the time of a lease, and the restores that ended some are an hour
        old."""
        for key in self.client.scan_iter("tinsmith:restore:*"):
            self.client.delete(key)
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

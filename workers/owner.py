"""The models this worker owns: a lease and a live state each, gained together and thrown away together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import redis

from app.errors import NotFound, OpError, TinsmithError
from app.stores.interfaces import HeldElsewhere, Lease, OpLog
from workers import telemetry
from workers.leases import LeaseKeeper
from workers.training.base import TrainingBackend
from workers.window import Window

log = logging.getLogger(__name__)


@dataclass
class Resident:
    """A model whose state here is exactly its journal up to `applied`."""

    lease: Lease
    applied: int
    window: Window


class Unrestorable(TinsmithError):
    """A model's snapshot or journal cannot be used. `lease` is the one that was gained, and given up again."""

    def __init__(self, lease: Lease, why: str) -> None:
        super().__init__(why)
        self.lease = lease


class Owner:
    """`restore(lease)` must bring the backend to the lease's applied seq, whatever was there before."""

    def __init__(
        self,
        oplog: OpLog,
        backend: TrainingBackend,
        keeper: LeaseKeeper,
        worker: str,
        restore: Callable[[Lease], Window],
    ) -> None:
        self._oplog, self._backend, self._keeper = oplog, backend, keeper
        self._worker, self._restore = worker, restore
        self._residents: dict[str, Resident] = {}

    def own(self, model_id: str) -> Resident | HeldElsewhere:
        """The model, restored if it is new here. Raises NotFound for an unknown one, Unrestorable."""
        resident = self._residents.get(model_id)
        if resident is not None and self._keeper.holds(model_id):
            return resident
        self.discard(model_id)
        lease = self._oplog.acquire(model_id, self._worker)
        if isinstance(lease, HeldElsewhere):
            return lease
        self._keeper.add(model_id)
        try:
            window = self._restore(lease)
        except (NotFound, OpError) as error:
            self.discard(model_id)
            raise Unrestorable(lease, f"{model_id} cannot be brought back: {error}") from error
        except BaseException:
            self.discard(model_id)
            raise
        self._residents[model_id] = Resident(lease, lease.applied, window)
        telemetry.MODELS.set(len(self._residents))
        log.info("owns a model", extra={"model_id": model_id, "epoch": lease.epoch, "applied": lease.applied})
        return self._residents[model_id]

    def discard(self, model_id: str) -> None:
        """Throw a state away; the journal brings it back when it is asked for again."""
        self._residents.pop(model_id, None)
        telemetry.MODELS.set(len(self._residents))
        self._backend.close(model_id)
        if self._keeper.holds(model_id):
            self._keeper.drop(model_id)
            with contextlib.suppress(redis.RedisError):  # it lapses by itself
                self._oplog.release(model_id, self._worker)

    def discard_all(self) -> None:
        for model_id in list(self._residents):
            self.discard(model_id)

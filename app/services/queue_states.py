"""Whether what a poll waits for moves on, in the words the SDK knows."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import lru_cache

from app.domain import records
from app.domain.records import Model, Sampler
from app.services.base_models import BaseModels, sampler_role, trainer_role
from app.stores.interfaces import Future, OpLog, Records

_LOOK_S = 2.0
_PARENTS = 4096


@dataclass(frozen=True, slots=True)
class QueueState:
    """`reason` is shown to the user; empty while the queue is active."""

    name: str
    reason: str = ""


ACTIVE = QueueState("active")


class QueueStates:
    """Asked only when a hold ends, of which 2,000 may do so within seconds: one look at the workers and at the store
    serves all polls for a moment, and whose worker a future needs never changes."""

    def __init__(self, bases: BaseModels, store: Records, oplog: OpLog) -> None:
        self._bases, self._records, self._oplog = bases, store, oplog
        self._needs = lru_cache(_PARENTS)(self._find_needed)
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._live: set[tuple[str, str]] = set()
        self._shortage = ""

    def of(self, future: Future) -> QueueState:
        """Of a future that is still pending."""
        needed = self._needs(future.kind == "sample", future.model_id)
        live, shortage = self._look()
        if needed and needed not in live:
            role, base = needed
            return QueueState("paused_capacity", f"no {role.replace('_', ' ')} of {base} is running")
        if shortage:
            return QueueState("paused_capacity", f"the server takes in no more work for now: {shortage}")
        return ACTIVE

    def _look(self) -> tuple[set[tuple[str, str]], str]:
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                # Noted first: in an outage one poll in a while finds out, and not one behind the other.
                self._looked = time.monotonic()
                self._live, self._shortage = self._bases.live(), self._oplog.shortage()
            return self._live, self._shortage

    def _find_needed(self, sample: bool, parent_id: str) -> tuple[str, str] | None:
        """(role, base model) of the workers that run it."""
        stored = self._records.get(Sampler.namespace if sample else Model.namespace, parent_id)
        if stored is None:
            return None
        if sample:
            sampler = records.load(Sampler, stored)
            return sampler_role(full=sampler.full), sampler.base_model
        model = records.load(Model, stored)
        return trainer_role(full=model.full), model.base_model

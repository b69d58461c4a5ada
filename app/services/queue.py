"""The queue as a caller sees it: the caller's waiting calls with their positions, and the state of a pending future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from app import ids
from app.domain import records
from app.domain.accounts import Caller
from app.domain.records import Model, Sampler
from app.errors import Unavailable
from app.services.base_models import BaseModels, sampler_role, trainer_role
from app.services.queue_position import Position, QueuePositions, describe
from app.services.views import Page
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Call, Future, Unfinished

# A snapshot of the queue may take tens of milliseconds, so a client that polls constantly gets two a second.
_SNAPSHOT_AGE_S = 0.5
_SAMPLE = "sample"

_STATE_SNAPSHOT_AGE_S = 2.0
_PARENTS = 4096

# With this many calls waiting, a snapshot takes about 50 ms, most of it in this process. A call further behind gets no
# position.
_MOST_POSITIONS = 10_000


class QueueService:
    """Lists a caller's waiting calls. Positions are at most half a second old, and calls that have ended since are left
    out."""

    def __init__(
        self,
        snapshots: QueueSnapshots,
        states: QueueStates,
        backlog: RedisBacklog,
        calls: RedisCalls,
        store: RedisRecords,
    ) -> None:
        self._snapshots, self._states, self._backlog, self._calls = snapshots, states, backlog, calls
        self._records = store

    def list(self, caller: Caller, page: Page) -> dict[str, Any]:
        """The body of GET queue: training calls by model and seq, then sampling requests by admission. Raises
        Unavailable."""
        snapshot = self._snapshots.newest(_SNAPSHOT_AGE_S)
        if snapshot is None:
            raise Unavailable("the state server does not answer or is full; try again soon")
        wanted, cursor = page.of(self._own(snapshot, caller))
        pending = [call for call in self._calls.of(wanted) if call.state == "pending"]
        begun = self._backlog.running([call.request_id for call in pending if call.kind == _SAMPLE])
        now = self._records.now()
        rows = [self._row(snapshot, call, now, begun=call.request_id in begun) for call in pending]
        return {"calls": rows, "cursor": cursor}

    def _own(self, snapshot: QueueSnapshot, caller: Caller) -> Sequence[str]:
        models = sorted(line.model_id for line in snapshot.unfinished.models if caller.sees(line.owner))
        seqs = self._backlog.seqs(models)
        training = [ids.request_id(model_id, seq) for model_id in models for seq in seqs[model_id]]
        return training + [one.request_id for one in snapshot.unfinished.samples if caller.sees(one.owner)]

    def _row(self, snapshot: QueueSnapshot, call: Call, now: float, *, begun: bool) -> dict[str, Any]:
        parent, _, seq = call.request_id.rpartition(":")
        state = self._states.at(snapshot, call.request_id, call.kind, parent)
        runs = begun or (state.position is not None and state.position.running)
        return {
            "request_id": call.request_id,
            "kind": call.kind,
            "sampling_session_id" if call.kind == _SAMPLE else "model_id": parent,
            "seq_id": int(seq),
            "waited_s": round(max(0.0, now - call.admitted), 3),
            **({"state": "running", "reason": "it runs now"} if runs else _waiting(state)),
        }


def _waiting(state: QueueState) -> dict[str, Any]:
    """The row of a call that waits. The call at position 1 runs next, or runs already."""
    position = state.position
    where = {"position": position.before + 1, "estimated_start_s": position.starts_in_s} if position else {}
    return {"state": "waiting" if state.name == "active" else state.name, "reason": state.reason, **where}


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of a pending call. `reason` is for the user: the cause of a pause, or the calls that run first. The SDK
    logs the reason of a paused call."""

    name: str
    reason: str = ""
    position: Position | None = None


ACTIVE = QueueState("active")


class QueueStates:
    """Computes the queue state of pending futures. It is used only when a long poll times out, and 2,000 polls may do
    so within seconds. So one snapshot serves all polls for a moment, and the worker role that a future needs is cached,
    because it never changes."""

    def __init__(self, snapshots: QueueSnapshots, store: RedisRecords) -> None:
        self._snapshots, self._records = snapshots, store
        self._needs = lru_cache(_PARENTS)(self._find_needed)

    def of(self, future: Future) -> QueueState:
        """The state of a future that is still pending."""
        snapshot = self._snapshots.newest(_STATE_SNAPSHOT_AGE_S)
        return self.at(snapshot, future.request_id, future.kind, future.model_id) if snapshot else ACTIVE

    def at(self, snapshot: QueueSnapshot, request_id: str, kind: str, parent_id: str) -> QueueState:
        """The same state in a given snapshot; `parent_id` is the request's model or sampler."""
        needed = self._needs(kind == "sample", parent_id)
        position = snapshot.positions.of(request_id)
        if needed and needed not in snapshot.live:
            role, base = needed
            return QueueState("paused_capacity", f"no {role.replace('_', ' ')} of {base} is running", position)
        if snapshot.shortage:
            return QueueState(
                "paused_capacity", f"the server accepts no new work for now: {snapshot.shortage}", position
            )
        return QueueState(ACTIVE.name, describe(position), position) if position else ACTIVE

    def _find_needed(self, sample: bool, parent_id: str) -> tuple[str, str] | None:
        """(role, base model) of the workers that run the call."""
        stored = self._records.get(Sampler.namespace if sample else Model.namespace, parent_id)
        if stored is None:
            return None
        if sample:
            sampler = records.load(Sampler, stored)
            return sampler_role(full=sampler.full), sampler.base_model
        model = records.load(Model, stored)
        return trainer_role(full=model.full), model.base_model


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A snapshot of the queue. `live`: (role, base model) of the live workers. `shortage`: the reason why no call is
    admitted; empty while there is room."""

    live: frozenset[tuple[str, str]]
    shortage: str
    unfinished: Unfinished
    positions: QueuePositions = field(repr=False)


class QueueSnapshots:
    """Takes and caches snapshots of the queue. One snapshot serves all polls within a moment, as 2,000 long polls may
    end within seconds. `weight_of` returns a project's weight."""

    def __init__(
        self, bases: BaseModels, oplog: RedisOpLog, backlog: RedisBacklog, weight_of: Callable[[str], float]
    ) -> None:
        self._bases, self._oplog, self._backlog, self._weight_of = bases, oplog, backlog, weight_of
        self._lock = threading.Lock()
        self._taken_at = float("-inf")
        self._newest: QueueSnapshot | None = None

    def newest(self, age_s: float) -> QueueSnapshot | None:
        """A snapshot at most about `age_s` old; None while none ever succeeded."""
        with self._lock:
            if time.monotonic() - self._taken_at > age_s:
                # The time is set first, so that in an outage only one caller per interval waits for the failure,
                # instead of all callers one after another.
                self._taken_at = time.monotonic()
                self._newest = self._take()
            return self._newest

    def _take(self) -> QueueSnapshot:
        workers, unfinished = self._bases.workers(), self._backlog.unfinished(_MOST_POSITIONS)
        live = frozenset((worker.role, worker.base_model) for worker in workers.values())
        return QueueSnapshot(
            live, self._oplog.shortage(), unfinished, QueuePositions(unfinished, workers, self._weight_of)
        )

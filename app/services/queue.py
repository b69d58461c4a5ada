"""The queue as a caller sees it: the caller's waiting calls with their positions, and the state of a pending future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Model, Sampler
from app.errors import STATE_SERVER_AWAY, Unavailable
from app.services.base_models import BaseModels, queue_of, roles, sampler_role, trainer_role
from app.services.queue_positions import Position, QueuePositions, describe
from app.services.views import Page
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Call, Future, Pending, Unfinished, Waiting

# A snapshot of the queue may take tens of milliseconds, so a client that polls constantly gets two a second.
_SNAPSHOT_AGE_S = 0.5
_SAMPLE = "sample"
_STATE_SNAPSHOT_AGE_S = 2.0
# /metrics needs no key, and these values take a read of all that waits.
_METRICS_AGE_S = 1.0
# Twice the models and samplers that a default API has polls for, if each is for another one. With more of them than
# places, each poll would read its own anew.
_PARENTS = 10_000
# With this many calls waiting, a snapshot takes about 50 ms, most of it in this process. A call further behind gets no
# position.
_MOST_POSITIONS = 10_000
T = TypeVar("T")


class Recent(Generic[T]):
    """Caches the newest value of `take` for all threads, so that one value serves all calls within a moment. `failed`:
    the newest call of `take` raised, so the value is older."""

    def __init__(self, take: Callable[[], T]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._taken_at = float("-inf")
        self._newest: T | None = None
        self.failed = False

    def newest(self, age_s: float, *, waits: bool = True) -> T | None:
        """A value at most about `age_s` old; None while none ever succeeded. Without `waits`, it is the one before
        while another thread takes the next."""
        if not self._lock.acquire(blocking=waits or self._newest is None):
            return self._newest
        try:
            if time.monotonic() - self._taken_at > age_s:
                try:
                    self._newest = self._take()
                except Exception:
                    self.failed = True
                    raise
                finally:
                    # In an outage too, so that only one caller per interval waits for the failure, instead of all
                    # callers one after another. A failure may take longer than the interval.
                    self._taken_at = time.monotonic()
                self.failed = False
            return self._newest
        finally:
            self._lock.release()


@dataclass(frozen=True, slots=True)
class QueueMetrics:
    """The values of the queues' metrics at one moment. `pending`: what waits longest, and `projects` the project of
    each, empty for one that has ended meanwhile; None if the metrics are not by project. `backlogs`: the work that
    waits for each (role, base model) that is served. A worker that is needed for anything else counts as one more."""

    pending: Sequence[Pending]
    projects: Sequence[str] | None
    backlogs: Mapping[tuple[str, str], Waiting]


class QueueService:
    """Lists a caller's waiting calls, and reads the metrics of the queues, with `by_project` also by project. Positions
    are at most half a second old, and calls that have ended since are left out."""

    def __init__(
        self,
        snapshots: QueueSnapshots,
        states: QueueStates,
        backlog: RedisBacklog,
        calls: RedisCalls,
        records: RedisRecords,
        bases: BaseModels,
        oplog: RedisOpLog,
        *,
        by_project: bool,
    ) -> None:
        self._snapshots, self._states, self._backlog, self._calls = snapshots, states, backlog, calls
        self._records, self._bases, self._oplog, self._by_project = records, bases, oplog, by_project
        self._recent_metrics = Recent(self._read_metrics)

    def list(self, caller: Caller, page: Page) -> dict[str, Any]:
        """The body of GET queue: training calls by model and seq, then sampling requests, those that are throttled or
        paused last. Raises Unavailable."""
        snapshot = self._snapshots.newest(_SNAPSHOT_AGE_S)
        if snapshot is None:
            raise Unavailable(STATE_SERVER_AWAY)
        wanted, cursor = page.of(self._own(snapshot, caller))
        pending = [call for call in self._calls.of(wanted) if call.state == "pending"]
        begun = self._backlog.running([call.request_id for call in pending if call.kind == _SAMPLE])
        now = self._records.now()
        rows = [self._row(snapshot, call, now, begun=call.request_id in begun) for call in pending]
        return {"calls": rows, "cursor": cursor}

    def metrics(self) -> QueueMetrics:
        """The values of the queues' metrics, at most about a second old. Raises Unavailable."""
        found = self._recent_metrics.newest(_METRICS_AGE_S)
        if found is None or self._recent_metrics.failed:
            raise Unavailable(STATE_SERVER_AWAY)
        return found

    def _read_metrics(self) -> QueueMetrics:
        pending = self._oplog.pending(depth=1)
        projects = self._backlog.owners([one.id for one in pending]) if self._by_project else None
        return QueueMetrics(pending, projects, self._read_backlogs())

    def _read_backlogs(self) -> dict[tuple[str, str], Waiting]:
        waiting, demanded = self._backlog.by_queue(), self._bases.demanded()
        found = {}
        for name in self._bases.names():
            for role in roles(self._bases.settings(name)):
                its = waiting.get(queue_of(role, name), Waiting(0, 0.0))
                found[role, name] = replace(its, number=its.number + ((role, name) in demanded))
        return found

    def _own(self, snapshot: QueueSnapshot, caller: Caller) -> Sequence[str]:
        models = sorted(line.model_id for line in snapshot.unfinished.models if caller.sees(line.owner))
        seqs = self._backlog.seqs(models)
        training = [ids.request_id(model_id, seq) for model_id in models for seq in seqs[model_id]]
        return training + [one.request_id for one in snapshot.unfinished.samples if caller.sees(one.owner)]

    def _row(self, snapshot: QueueSnapshot, call: Call, now: float, *, begun: bool) -> dict[str, Any]:
        parent = ids.parent_of(call.request_id)
        state = self._states.at(snapshot, call.request_id, call.kind, parent)
        runs = begun or (state.position is not None and state.position.running)
        return {
            "request_id": call.request_id,
            "kind": call.kind,
            "sampling_session_id" if call.kind == _SAMPLE else "model_id": parent,
            "seq_id": ids.seq_of(call.request_id),
            "waited_s": round(max(0.0, now - call.admitted), 3),
            **({"state": "running", "reason": "it runs now"} if runs else _waiting(state)),
        }


def _waiting(state: QueueState) -> dict[str, Any]:
    """The row of a call that waits. The call at position 1 runs next."""
    position = state.position
    where = {"position": position.before + 1, "estimated_start_s": position.starts_in_s} if position else {}
    return {"state": "waiting" if state.name == ACTIVE.name else state.name, "reason": state.reason, **where}


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of a pending call. `reason` is for the user: the cause of a pause, or the calls that run first. The SDK
    logs the reason of a paused call."""

    name: str
    reason: str = ""
    position: Position | None = None


ACTIVE = QueueState("active")


class QueueStates:
    """Computes the queue state of pending futures. It caches the worker role that a future needs, which never
    changes."""

    def __init__(self, snapshots: QueueSnapshots, records: RedisRecords) -> None:
        self._snapshots, self._records = snapshots, records
        self._needs = lru_cache(_PARENTS)(self._find_needed)

    def of(self, future: Future) -> QueueState:
        """The state of a future that is still pending."""
        # Few polls are answered at a time, so no other one could be while these wait for a snapshot.
        snapshot = self._snapshots.newest(_STATE_SNAPSHOT_AGE_S, waits=False)
        return self.at(snapshot, future.request_id, future.kind, future.model_id) if snapshot else ACTIVE

    def at(self, snapshot: QueueSnapshot, request_id: str, kind: str, parent_id: str) -> QueueState:
        """The same state in a given snapshot; `parent_id` is the request's model or sampler."""
        needed = self._needs(kind == _SAMPLE, parent_id)
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
        found = self._records.find(Sampler, parent_id) if sample else self._records.find(Model, parent_id)
        if found is None:
            return None
        role = sampler_role(full=found.full) if sample else trainer_role(full=found.full)
        return role, found.base_model


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A snapshot of the queue. `live`: (role, base model) of the live workers. `shortage`: the reason why no call is
    admitted; empty while there is room."""

    live: frozenset[tuple[str, str]]
    shortage: str
    unfinished: Unfinished
    positions: QueuePositions = field(repr=False)


class QueueSnapshots(Recent[QueueSnapshot]):
    """Takes and caches snapshots of the queue. One snapshot serves all polls of a moment: 5,000 of them may end
    within seconds. `weight_of` returns a project's weight."""

    def __init__(
        self, bases: BaseModels, oplog: RedisOpLog, backlog: RedisBacklog, weight_of: Callable[[str], float]
    ) -> None:
        super().__init__(self._take_snapshot)
        self._bases, self._oplog, self._backlog, self._weight_of = bases, oplog, backlog, weight_of

    def _take_snapshot(self) -> QueueSnapshot:
        workers, unfinished = self._bases.workers(), self._backlog.unfinished(_MOST_POSITIONS)
        live = frozenset((worker.role, worker.base_model) for worker in workers.values())
        return QueueSnapshot(
            live, self._oplog.shortage(), unfinished, QueuePositions(unfinished, workers, self._weight_of)
        )

"""The queue as a caller sees it: the caller's waiting calls with their positions, and the state of a pending future.

The fair queue goes round: over the projects by their weights, then over the models of one project
(workers/train/scheduler.py). With n calls of its own project ahead, at most ceil((n + 1) * w_other / w_own) calls of
each other project run first. This maximum holds for calls of equal duration. A turn is an amount of time, so a
project with short calls runs more of them in each turn.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any, Generic, TypeVar

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Model, Sampler, Worker
from app.errors import STATE_SERVER_AWAY, Unavailable
from app.services.base_models import BaseModels, queue_of, roles, sampler_role, trainer_role
from app.services.views import Page
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Call, Future, ModelLine, Pending, Unfinished, Waiting

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


@dataclass(frozen=True, slots=True)
class Position:
    """The queue position of one call. `before`: number of calls that run first. `starts_in_s`: seconds until its start
    at the workers' current service time; None while that is unknown. `missing`: the seq of the same model that must
    arrive first. A `paused` sample waits for its client, behind all others."""

    before: int
    starts_in_s: float | None
    running: bool = False
    missing: int | None = None
    paused: bool = False


ACTIVE = QueueState("active")


class QueueStates:
    """Computes the queue state of pending futures. It is used only when a long poll times out, and 2,000 polls may do
    so within seconds. So one snapshot serves all polls for a moment, and the worker role that a future needs is cached,
    because it never changes."""

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
    """Takes and caches snapshots of the queue. One snapshot serves all polls within a moment, as 5,000 long polls may
    end within seconds. `weight_of` returns a project's weight."""

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


@dataclass(frozen=True, slots=True)
class _WorkerPool:
    """The workers that read one queue. `rate`: calls per second, over the workers that ran any calls recently."""

    service_times: Mapping[str, float]
    batch: int

    @property
    def rate(self) -> float:
        return sum(1 / service_time for service_time in self.service_times.values() if service_time)

    def seconds(self, calls: int, node: str = "") -> float | None:
        """Seconds until this many calls have ended: at `node` if it is one of these workers, else at any of them."""
        if calls <= 0:
            return 0.0
        rate = 1 / service_time if (service_time := self.service_times.get(node)) else self.rate
        return calls / rate if rate else None


class _Lane:
    """The waiting calls at one node: `models` holds, for each project, the waiting calls of each of its models.
    `waiting` holds their sum."""

    def __init__(self, models: Mapping[str, Mapping[str, int]]) -> None:
        self._models = models
        self.waiting = {owner: sum(own.values()) for owner, own in models.items()}
        self._in_turns: dict[tuple[str, int], int] = {}

    def in_turns(self, owner: str, turns: int) -> int:
        """The calls that run while each of the project's models has `turns` turns. They are counted once for all calls
        with this number: a project may have thousands of models."""
        if (owner, turns) not in self._in_turns:
            self._in_turns[owner, turns] = sum(min(count, turns) for count in self._models[owner].values())
        return self._in_turns[owner, turns]


class QueuePositions:
    """Queue positions at one moment. `workers`: the healthy workers, by node. A project's weight is greater than 0."""

    def __init__(self, found: Unfinished, workers: Mapping[str, Worker], weight_of: Callable[[str], float]) -> None:
        self._workers, self._weight_of = workers, weight_of
        self._lines = {line.model_id: line for line in found.models}
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._samples: dict[str, tuple[str, str, int]] = {}
        self._paused = {sample.request_id: sample.queue for sample in found.samples if sample.paused}
        self._sampled: dict[str, Counter[str]] = defaultdict(Counter)
        for sample in found.samples:
            if not sample.paused:
                of_queue = self._sampled[sample.queue]
                self._samples[sample.request_id] = sample.queue, sample.owner, of_queue[sample.owner]
                of_queue[sample.owner] += 1
        self._sequences = found.sequences
        self._pools: dict[str, _WorkerPool] = {}

    def of(self, request_id: str) -> Position | None:
        """The position of a call; None if the call was not waiting then, or is beyond the counted part of the queue."""
        if request_id in self._samples:
            return self._of_sample(*self._samples[request_id])
        if request_id in self._paused:
            return Position(self._sampled[self._paused[request_id]].total(), None, paused=True)
        line = self._lines.get(ids.parent_of(request_id))
        return self._of_model(line, ids.seq_of(request_id) - line.applied - 1) if line else None

    def _of_model(self, line: ModelLine, earlier: int) -> Position | None:
        """The position of a call behind `earlier` calls of its own model."""
        if earlier < 0:
            return None
        lane = self._lane(line.queue, line.node)
        turns = earlier + 1
        mine = earlier + lane.in_turns(line.owner, turns) - min(line.waiting, turns)
        before = self._behind_others(mine, line.owner, lane.waiting)
        if line.running and not earlier:
            return Position(0, 0.0, running=True)
        if not line.admitted:
            return Position(before, None, missing=line.applied + 1)
        return Position(before, self._pool(line.queue).seconds(before, line.node))

    def _of_sample(self, queue: str, owner: str, earlier: int) -> Position:
        """The position of a request behind `earlier` requests of its own project. Requests that fit into the batches
        run at once."""
        waiting = self._sampled[queue]
        before = self._behind_others(earlier, owner, waiting)
        pool = self._pool(queue)
        rows = max(1.0, self._sequences.get(queue, 0) / waiting.total())
        return Position(before, pool.seconds(before + 1 - int(pool.batch / rows)))

    def _behind_others(self, earlier: int, owner: str, waiting: Mapping[str, int]) -> int:
        own = self._weight_of(owner)
        return _behind(
            earlier, ((count, self._weight_of(other) / own) for other, count in waiting.items() if other != owner)
        )

    def _lane(self, queue: str, node: str) -> _Lane:
        if (queue, node) not in self._lanes:
            models: dict[str, dict[str, int]] = defaultdict(dict)
            for line in self._lines.values():
                if line.queue == queue and _share_a_worker(line.node, node):
                    models[line.owner][line.model_id] = line.waiting
            self._lanes[queue, node] = _Lane(models)
        return self._lanes[queue, node]

    def _pool(self, queue: str) -> _WorkerPool:
        if queue not in self._pools:
            own = {node: worker for node, worker in self._workers.items() if worker.queue == queue}
            service_times = {node: worker.pace_s for node, worker in own.items()}
            self._pools[queue] = _WorkerPool(service_times, sum(worker.batch for worker in own.values()))
        return self._pools[queue]


def _behind(own: int, others: Iterable[tuple[int, float]]) -> int:
    """The number of calls that run before a call with `own` earlier calls of its project. `others` holds, for each
    other project, its waiting calls and its turns per turn of this one."""
    return own + sum(min(waiting, ceil((own + 1) * turns)) for waiting, turns in others)


def _share_a_worker(node: str, other: str) -> bool:
    """True if models at these two nodes can run on the same worker. A model that no node holds can go to any worker."""
    return node == other or not node or not other


def describe(position: Position) -> str:
    """The position in words, for the user."""
    if position.running:
        return "it runs now"
    if position.missing is not None:
        return f"seq {position.missing} of its model has not arrived yet and must run first"
    if position.paused:
        return "its client is silent; it waits for the client's next heartbeat, poll or call"
    if not position.before or position.starts_in_s == 0:
        return "it runs now, or starts next"
    known = "" if position.starts_in_s is None else f", for about {_duration(position.starts_in_s)}"
    return f"{'1 call runs' if position.before == 1 else f'about {position.before} calls run'} before it{known}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "a second"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

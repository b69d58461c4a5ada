"""Queue positions: the number of calls that run before a waiting call, and the seconds until it starts.

The fair queue goes round: over the projects by their weights, then over the models of one project
(workers/train/scheduler.py). With n calls of its own project ahead, at most ceil((n + 1) * w_other / w_own) calls of
each other project run first. This maximum holds for calls of equal duration. A turn is an amount of time, so a
project with short calls runs more of them in each turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from app import ids
from app.domain.records import Worker
from app.stores.redis.types import ModelLine, Unfinished


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
        if line.running and not earlier:
            return Position(0, 0.0, running=True)
        lane = self._lane(line.queue, line.node)
        turns = earlier + 1
        mine = earlier + lane.in_turns(line.owner, turns) - min(line.waiting, turns)
        before = self._behind_others(mine, line.owner, lane.waiting)
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
        """The number of calls that run before a call with `earlier` calls of its own project. `waiting` holds the
        waiting calls of each project."""
        own = self._weight_of(owner)
        others = ((count, self._weight_of(other) / own) for other, count in waiting.items() if other != owner)
        return earlier + sum(min(count, ceil((earlier + 1) * turns)) for count, turns in others)

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

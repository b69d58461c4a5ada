"""Batch admission of sampling requests to the engine, the fairest first, and throttled dispatch.

An engine receives only as many requests as it can decode at once, and a few more, which keep its batch full while the
next request is admitted. All others wait here; the project that had the least of the tokens, by weight, goes first. If
it has fewer sequences inside than its share of the batch, it does not wait for those of others to end: the engine
divides its batch among the projects (workers/backends/sampling/shares.py).

Requests of a project that has enough under way are throttled; they are dispatched as others end.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis

from app import dispatch, ids
from app.domain.sampling import SampleRequest
from app.stores.redis.journal import RedisOpLog
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.backends.sampling.shares import shares
from workers.process import telemetry
from workers.process.fair_queue import FairQueue

log = logging.getLogger(__name__)
# One extra sequence is admitted for this many sequences of a batch.
_SLACK = 8


@dataclass(eq=False)
class QueuedRequest:
    """One request's turn. `rows`: its sequences that have not ended. At admission its project is charged for
    `most_tokens`, divided by `weight`; the end of the turn corrects the charge."""

    project: str
    weight: float
    rows: int
    most_tokens: int
    admitted: threading.Event = field(default_factory=threading.Event)


class BatchAdmission:
    """Batch admission. Safe from any thread. `batch`: sequences that the engine decodes at once; `weight_of(project)`
    is over 0."""

    def __init__(self, fair_queue: FairQueue, weight_of: Callable[[str], float], batch: int) -> None:
        self._fair_queue, self._weight_of = fair_queue, weight_of
        self._most_sequences = batch + max(1, batch // _SLACK)
        self._batch = batch
        telemetry.BATCH_CAPACITY.set(batch)
        self._lock = threading.Lock()
        self._inside = Counter[str]()
        """Sequences in the engine by project."""
        self._weights: dict[str, float] = {}
        self._waiting: dict[str, deque[QueuedRequest]] = {}
        """Waiting turns by project, in the order of their arrival."""

    @contextmanager
    def slot(self, project: str, request: SampleRequest, handle: RequestHandle) -> Iterator[None]:
        """Waits for the request's turn, which lasts as long as the block. Each sequence makes room as soon as `handle`
        reports its end. At the end the project pays for the tokens used by then, including the prompt. Raises Aborted
        if `handle` is aborted before the turn.

        A request with more sequences than there is room for is admitted when there is any room: otherwise it might wait
        forever.
        """
        mine = QueuedRequest(project, self._weight_of(project), request.num_samples, request.most_tokens)
        handle.project, handle.weight = project, mine.weight
        handle.on_end = lambda: self._make_room(mine, 1)
        self._wait(mine, handle)
        try:
            yield
        finally:
            self._correct(mine, handle.tokens_used)
            self._make_room(mine, mine.rows)

    def _wait(self, mine: QueuedRequest, handle: RequestHandle) -> None:
        with self._lock:
            self._weights[mine.project] = mine.weight
            if mine.project not in self._waiting:
                self._waiting[mine.project] = deque()
                self._fair_queue.enter(mine.project)
            self._waiting[mine.project].append(mine)
            self._admit()
        handle.on_abort(mine.admitted.set)
        mine.admitted.wait()
        with self._lock:
            if mine in self._waiting.get(mine.project, ()):
                self._remove(mine)
                self._report()
                raise Aborted("the request was stopped before its turn")

    def _correct(self, mine: QueuedRequest, tokens_used: int) -> None:
        with self._lock:
            self._fair_queue.settle(mine.project, mine.most_tokens / mine.weight, tokens_used / mine.weight)

    def _make_room(self, mine: QueuedRequest, rows: int) -> None:
        with self._lock:
            ended = min(rows, mine.rows)
            mine.rows -= ended
            self._inside[mine.project] -= ended
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(project := min(self._waiting, key=self._fair_queue.virtual_time)):
            mine = self._waiting[project][0]
            self._fair_queue.begin(mine.project)
            self._fair_queue.reserve(mine.project, mine.most_tokens / mine.weight)
            self._remove(mine)
            self._inside[mine.project] += mine.rows
            mine.admitted.set()
        self._report()

    def _has_room(self, project: str) -> bool:
        """True if the project's next request may go in: a full batch makes room for a project below its share."""
        if self._inside.total() < self._most_sequences:
            return True
        self._inside = +self._inside  # drops the projects without sequences
        self._weights = {name: self._weights[name] for name in {*self._inside, *self._waiting}}
        return self._inside[project] < shares(self._weights, self._batch)[project]

    def _remove(self, mine: QueuedRequest) -> None:
        waiting = self._waiting[mine.project]
        waiting.remove(mine)
        if not waiting:
            del self._waiting[mine.project]
            self._fair_queue.leave(mine.project)

    def _report(self) -> None:
        telemetry.BATCH_SEQUENCES.set(self._inside.total())
        telemetry.BATCH_WAITING.set(sum(map(len, self._waiting.values())))


@dataclass(frozen=True, slots=True)
class ThrottledDispatch:
    """Throttled dispatch of a queue's requests.

    `most_served()` returns the projects that had more than the least served one, in the order of their virtual times:
    their requests come last."""

    oplog: RedisOpLog
    send: dispatch.Send
    queue: str
    most_served: Callable[[], Sequence[str]] = tuple

    def dispatch_next(self) -> None:
        """Dispatches as many requests as there is room for. Dispatches none while the state server is away; the
        redispatch task does it later."""
        try:
            due = self.oplog.release_samples(self.queue, self.most_served())
        except redis.RedisError as error:
            log.warning("could not dispatch the next requests: %s", error)
            return
        for request_id, node in due:
            self.send("sample", request_id, ids.parent_of(request_id), dispatch.queue_for(self.queue, node))

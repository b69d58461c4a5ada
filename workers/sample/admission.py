"""Batch admission of sampling requests to the engine, the fairest first, and throttled dispatch.

An engine serves its requests in the order in which it received them. So it receives only as many as it can decode at
once, and a few more, which keep its batch full while the next request is admitted. All others wait here; the project
that had the least of the tokens, by weight, goes first.

Requests of a project that has enough under way are throttled; they are dispatched as others end.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis

from app import dispatch
from app.domain.sampling import SampleRequest
from app.stores.redis.journal import RedisOpLog
from workers.backends.sampling.base import Aborted, Watch
from workers.process.fair_queue import Shares

log = logging.getLogger(__name__)
# One extra sequence is admitted for this many sequences of a batch.
_SLACK = 8


@dataclass(eq=False)
class Turn:
    """One request's turn. `rows`: its sequences that have not ended. At admission its project is charged for `most`
    tokens; the end of the turn corrects the charge."""

    project: str
    weight: float
    rows: int
    most: int
    let_in: threading.Event = field(default_factory=threading.Event)


class Gate:
    """Batch admission. Safe from any thread. `batch`: sequences that the engine decodes at once; `weight_of(project)`
    is over 0."""

    def __init__(self, shares: Shares, weight_of: Callable[[str], float], batch: int) -> None:
        self._shares, self._weight_of = shares, weight_of
        self._most = batch + max(1, batch // _SLACK)
        self._lock = threading.Lock()
        self._inside = 0
        self._waiting: dict[str, deque[Turn]] = {}
        """Waiting turns by project, in the order of their arrival."""

    @contextmanager
    def turn(self, project: str, request: SampleRequest, watch: Watch) -> Iterator[None]:
        """Waits for the request's turn, which lasts as long as the block. Each sequence makes room as soon as `watch`
        reports its end. At the end the project pays for the tokens used by then, including the prompt. Raises Aborted
        if `watch` is aborted before the turn.

        A request with more sequences than there is room for is admitted when there is any room: otherwise it might wait
        forever.
        """
        most = len(request.prompt) + request.num_samples * request.max_tokens
        mine = Turn(project, self._weight_of(project), request.num_samples, most)
        watch.ended = lambda: self._make_room(mine, 1)
        self._wait(mine, watch)
        watch.took += len(request.prompt)
        try:
            yield
        finally:
            self._correct(mine, watch.took)
            self._make_room(mine, mine.rows)

    def _wait(self, mine: Turn, watch: Watch) -> None:
        with self._lock:
            if mine.project not in self._waiting:
                self._waiting[mine.project] = deque()
                self._shares.enter(mine.project)
            self._waiting[mine.project].append(mine)
            self._let_in()
        watch.on_abort(mine.let_in.set)
        mine.let_in.wait()
        with self._lock:
            if mine in self._waiting.get(mine.project, ()):
                self._take_out(mine)
                raise Aborted("the request was stopped before its turn")

    def _correct(self, mine: Turn, took: int) -> None:
        with self._lock:
            self._shares.settle(mine.project, mine.most / mine.weight, took / mine.weight)

    def _make_room(self, mine: Turn, rows: int) -> None:
        with self._lock:
            ended = min(rows, mine.rows)
            mine.rows -= ended
            self._inside -= ended
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._inside < self._most:
            mine = self._waiting[min(self._waiting, key=self._shares.place)][0]
            self._shares.begin(mine.project)
            self._shares.lend(mine.project, mine.most / mine.weight)
            self._take_out(mine)
            self._inside += mine.rows
            mine.let_in.set()

    def _take_out(self, mine: Turn) -> None:
        waiting = self._waiting[mine.project]
        waiting.remove(mine)
        if not waiting:
            del self._waiting[mine.project]
            self._shares.leave(mine.project)


@dataclass(frozen=True, slots=True)
class Held:
    """Throttled dispatch of a queue's requests.

    `ring(kind, request id, sampling session id, queue)` dispatches a request. `ahead()` returns the projects whose
    turns are not due, the one that had most last.
    """

    oplog: RedisOpLog
    ring: Callable[[str, str, str, str], None]
    queue: str
    ahead: Callable[[], Sequence[str]] = tuple

    def ring_next(self) -> None:
        """Dispatches as many requests as there is room for. Dispatches none while the state server is away; the
        redispatch task does it later."""
        try:
            due = self.oplog.release_samples(self.queue, self.ahead())
        except redis.RedisError as error:
            log.warning("could not dispatch the next requests: %s", error)
            return
        for request_id, node in due:
            queue = dispatch.direct_queue(self.queue, node) if node else self.queue
            self.ring("sample", request_id, request_id.rpartition(":")[0], queue)

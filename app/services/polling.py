"""Polls: finds futures, limits how long polls are held, and cancels sampling requests that no client waits for."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import redis

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Loss, Model, Sampler
from app.domain.results import Result
from app.errors import BadRequest, NotFound, TooManyRequests, Unavailable
from app.services.tenants.access import Owned, check_role, load_owned, load_readable
from app.settings import ApiSettings
from app.stores.redis.client import Waiter, is_outage
from app.stores.redis.completions import RedisCompletions
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Completion, Future
from app.suspension import Suspension
from app.telemetry import HELD_POLLS, POLL_SECONDS

CUSTOM_LOSS, UNLOAD = "create_custom_loss", "unload_model"
_REQUEST_ID = re.compile(r".+:[0-9]{1,19}")
_SHORT_HOLD_S = 1.0

T = TypeVar("T")
CheckKey = Callable[[Caller], None]
"""Raises Unauthorized if the caller's key is no longer valid."""
NotePoll = Callable[[str], None]
"""Notes that a client waits for the result of the request with this id."""


def check_request_id(text: str) -> None:
    """Raises NotFound for a text that cannot be a future's id."""
    if not _REQUEST_ID.fullmatch(text):
        raise NotFound(f"future {text[:200]!r} does not exist")


class LongPolls:
    """Holds long polls until their result is there: suspended, if the server can do that (app/suspension.py), or else
    in their threads. Each kind has its own limiter. `waiter` wakes the polls. A poll that waited gets nothing if its
    key was revoked meanwhile."""

    def __init__(
        self, waiter: Waiter, in_threads: LongPollLimiter, suspended: LongPollLimiter, check_key: CheckKey
    ) -> None:
        self._waiter, self._in_threads, self._suspended, self._check_key = waiter, in_threads, suspended, check_key

    def hold(
        self,
        caller: Caller,
        id_: str,
        look: Callable[[], T],
        is_done: Callable[[T], bool],
        suspension: Suspension | None,
        at_most_s: float = math.inf,
    ) -> T | None:
        """The result of `look`, once that `is_done` or the hold time is over. `id_` is published when there is news.

        None if the poll was suspended. The server later runs the same request again from the start, and checks its key
        again. Raises Unauthorized, and the errors of `look`.
        """
        if suspension is None:
            with self._in_threads.hold(caller.project) as seconds:
                return self._wait(caller, id_, look, is_done, min(seconds, at_most_s))
        if suspension.is_over:
            return look()
        with contextlib.ExitStack() as undo:
            seconds = min(undo.enter_context(self._suspended.hold(caller.project)), at_most_s)
            undo.enter_context(self._waiter.watch(id_, suspension.resume))
            found = look()
            if is_done(found) or not seconds:
                return found
            suspension.suspend(seconds, undo.pop_all().close)
            return None

    def _wait(self, caller: Caller, id_: str, look: Callable[[], T], is_done: Callable[[T], bool], seconds: float) -> T:
        done: list[T] = []

        def check() -> bool:
            found = look()
            if is_done(found):
                done.append(found)
            return bool(done)

        if seconds:
            self._waiter.wait(id_, seconds, check)
            if not done:
                self._check_key(caller)
        return done[0] if done else look()


class PollService:
    """Long polls for one future. A poll that has to wait is a sign of life of its session."""

    def __init__(self, futures: FutureFinder, polls: LongPolls, note_poll: NotePoll) -> None:
        self._futures, self._polls, self._note_poll = futures, polls, note_poll

    def wait(self, request_id: str, caller: Caller, suspension: Suspension | None = None) -> Future | None:
        """The future, once it is terminal or the hold time is over; None if the poll was suspended. Raises NotFound,
        Gone or Unauthorized."""
        check_request_id(request_id)

        def look() -> Future:
            found = self._futures.future(request_id, caller)
            # The end of a hold is no sign of its client, and a note costs one of two round trips.
            is_sign = suspension is None or not suspension.is_over
            if is_sign and found.result is None and caller.takes_results(found.owner):
                self._note_poll(request_id)
            return found

        return self._polls.hold(caller, request_id, look, lambda future: future.result is not None, suspension)


class BatchPollService:
    """One long poll for all requests of a client, so that the client needs one connection however many samples it waits
    for."""

    def __init__(
        self, completions: RedisCompletions, records: RedisRecords, polls: LongPolls, note_poll: NotePoll
    ) -> None:
        self._completions, self._records, self._polls, self._note_poll = completions, records, polls, note_poll

    def wait(
        self, caller: Caller, asked: Mapping[str, Any], suspension: Suspension | None = None
    ) -> tuple[list[Completion], int] | None:
        """The completions after `prev_cursor`, once there is one or the hold time is over, and the next cursor; None if
        the poll was suspended.

        Raises NotFound (sampler), Forbidden for a viewer, or Unauthorized.
        """
        sampler_id = asked["target"]["sampling_session_id"]
        target = ids.poll_target(sampler_id, asked["target"]["cloned_sampler_id"])
        timeout = asked.get("timeout")

        def look() -> tuple[list[Completion], int]:
            load_owned(self._records, Sampler, sampler_id, caller)
            own = f"{sampler_id}:"
            self._note_poll(own)
            self._completions.acknowledge(id_ for id_ in asked["retrieved_request_ids"] if id_.startswith(own))
            return self._completions.since(target, asked["prev_cursor"])

        at_most_s = math.inf if timeout is None else timeout
        return self._polls.hold(caller, target, look, lambda found: bool(found[0]), suspension, at_most_s)


class FutureFinder:
    """Finds any future: those of the journal, and those of calls for which nothing has to run.

    A call of the second kind has only the record that it created or marked, and its future is done while that record
    exists.
    """

    def __init__(self, oplog: RedisOpLog, records: RedisRecords) -> None:
        self._oplog, self._records = oplog, records

    def future(self, request_id: str, caller: Caller, *, delivers: bool = True) -> Future:
        """The future. Its result is noted as read if the caller takes results, and if this call `delivers` it. Raises
        NotFound for an unknown or foreign id (with the same text), and Gone for an expired one."""
        model_id = ids.unloaded_by(request_id)
        if model_id is not None:
            return self._done(request_id, caller, Model, model_id, UNLOAD, "model_id")
        if ids.is_loss_id(request_id):
            return self._done(request_id, caller, Loss, request_id, CUSTOM_LOSS, "loss_id")
        # A caller that only looks on leaves the result in place for the client that waits for it.
        viewed = {project for project in caller.roles if not (delivers and caller.takes_results(project))}
        return self._oplog.future(request_id, caller.roles.keys(), viewed)

    def _done(self, request_id: str, caller: Caller, cls: type[Owned], key: str, kind: str, named: str) -> Future:
        try:
            owner = load_readable(self._records, cls, key, caller).owner
        except NotFound:
            raise NotFound(f"future {request_id!r} does not exist") from None
        return Future(request_id, kind, "", owner, "done", Result(json.dumps({"type": kind, named: key}).encode()))


class LongPollLimiter:
    """Limits and counts long polls. A poll is never refused; above the capacity it is answered sooner.

    The projects that poll now share the capacity equally. Other projects may have filled the capacity. A project within
    its share still gets full holds, as long as a quarter of the spare threads is left. The next polls of those above
    their share are held for a moment at most, until they are back at it. Each place of the capacity holds
    `polls_a_place`.
    """

    def __init__(self, settings: ApiSettings, polls_a_place: int = 1) -> None:
        self._settings, self._polls_a_place = settings, polls_a_place
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, project: str) -> Iterator[float]:
        """The seconds that the project's poll in this block may wait.

        While Redis or the object store is away the poll is still held for a moment, because the SDK polls again at once
        after a 5xx.
        """
        with self._lock:
            self._open[project] += 1
            seconds = self._seconds(project)
        HELD_POLLS.inc()
        try:
            with POLL_SECONDS.time():
                yield seconds
        except (redis.RedisError, Unavailable) as error:
            if isinstance(error, Unavailable) or is_outage(error):
                time.sleep(min(seconds, _SHORT_HOLD_S))
            raise
        finally:
            with self._lock:
                self._open[project] -= 1
                if not self._open[project]:
                    del self._open[project]
            HELD_POLLS.dec()

    @contextlib.contextmanager
    def occupy(self, project: str) -> Iterator[None]:
        """Counts an answer that stays open until its result is there as a held poll of the project. Raises
        TooManyRequests where a poll would not be held in full, because a client of such an answer cannot be asked to
        poll again."""
        with self.hold(project):
            with self._lock:
                has_place = self._has_place(project)
            if not has_place:
                raise TooManyRequests(
                    f"{self._capacity} polls already wait for results on this server, and project "
                    f"{project} has its share of them; try again soon"
                )
            yield

    @property
    def _capacity(self) -> int:
        return self._settings.poll_capacity * self._polls_a_place

    def _seconds(self, project: str) -> float:
        """The hold time of the project's newest poll. Half of the spare threads takes polls above the capacity, and
        another quarter those of projects within their share."""
        full = self._settings.poll_hold_s
        if self._has_place(project):
            return full
        most = self._capacity + self._settings.spare_threads // 2
        return min(_SHORT_HOLD_S, full) if self._open.total() <= most else 0.0

    def _has_place(self, project: str) -> bool:
        """True if the project's newest poll is held in full."""
        capacity, polls = self._capacity, self._open.total()
        if polls <= capacity:
            return True
        is_within_share = self._open[project] <= capacity // len(self._open)
        return is_within_share and polls <= capacity + self._settings.spare_threads * 3 // 4


class CancelService:
    """Cancels sampling requests. A cancelled request counts as failed: it stops running, and its queue capacity is free
    at once."""

    def __init__(self, futures: FutureFinder, oplog: RedisOpLog) -> None:
        self._futures, self._oplog = futures, oplog

    def cancel(self, request_id: str, caller: Caller) -> None:
        """Fails the request unless its result is there. Raises NotFound or Gone as a poll does, Forbidden, or
        BadRequest for other futures."""
        check_request_id(request_id)
        # The client that waits for the request may be another one, which was not told yet that it has ended.
        future = self._futures.future(request_id, caller, delivers=False)
        check_role(caller, future.owner)
        if future.kind != "sample":
            raise BadRequest(
                f"{request_id} is the future of {future.kind}, and only sampling requests can be cancelled: a model's "
                "calls run in seq order, and the calls after this one rely on it. To end all waiting calls of a run, "
                "delete the run (DELETE /api/v1/training_runs/<run>); its checkpoints stay"
            )
        if future.result is None:
            self._oplog.cancel_sample(request_id)

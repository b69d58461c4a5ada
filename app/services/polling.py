"""Polls: finds futures, limits how long polls are held, and cancels sampling requests that no client waits for."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from app.telemetry import HELD_POLLS

_REQUEST_ID = re.compile(r".+:[0-9]{1,19}")

CUSTOM_LOSS, UNLOAD = "create_custom_loss", "unload_model"

_SHORT_HOLD_S = 1.0


def check_request_id(text: str) -> None:
    """Raises NotFound for a text that cannot be a future's id."""
    if not _REQUEST_ID.fullmatch(text):
        raise NotFound(f"no future {text[:200]!r}")


CheckKey = Callable[[Caller], None]
"""Raises Unauthorized if the caller's key is no longer valid."""
NotePoll = Callable[[str], None]
"""Notes that a client waits for the result of the request with this id."""


class PollService:
    """Long polls for one future. `waiter` wakes a poll when the result is there. A poll that waited gets nothing if its
    key was revoked meanwhile. A poll that has to wait is a sign of life of its session."""

    def __init__(
        self,
        futures: FutureFinder,
        waiter: Waiter,
        poll_limiter: LongPollLimiter,
        check_key: CheckKey,
        note_poll: NotePoll,
    ) -> None:
        self._futures, self._waiter, self._poll_limiter, self._check_key = futures, waiter, poll_limiter, check_key
        self._note_poll = note_poll

    def wait(self, request_id: str, caller: Caller) -> Future:
        """The future, once it is terminal or the hold time is over. Raises NotFound, Gone or Unauthorized."""
        check_request_id(request_id)
        with self._poll_limiter.hold(caller.project) as seconds:
            return self._wait(request_id, caller, seconds)

    def _wait(self, request_id: str, caller: Caller, seconds: float) -> Future:
        found = self._futures.future(request_id, caller)

        def is_done() -> bool:
            nonlocal found
            found = self._futures.future(request_id, caller)
            return found.result is not None

        if found.result is None and caller.may("member", found.owner):
            self._note_poll(request_id)
        if found.result is None and seconds:
            self._waiter.wait(request_id, seconds, is_done)
            if found.result is None:
                self._check_key(caller)
                is_done()
        return found


class BatchPollService:
    """One long poll for all requests of a client, so that the client needs one connection however many samples it waits
    for."""

    def __init__(
        self,
        completions: RedisCompletions,
        store: RedisRecords,
        waiter: Waiter,
        poll_limiter: LongPollLimiter,
        check_key: CheckKey,
        note_poll: NotePoll,
    ) -> None:
        self._completions, self._records, self._waiter, self._poll_limiter = completions, store, waiter, poll_limiter
        self._check_key, self._note_poll = check_key, note_poll

    def wait(self, caller: Caller, asked: Mapping[str, Any]) -> tuple[list[Completion], int]:
        """The completions after `prev_cursor`, once there is one or the hold time is over; and the next cursor.

        Raises NotFound (sampler) or Unauthorized.
        """
        sampler_id = asked["target"]["sampling_session_id"]
        with self._poll_limiter.hold(caller.project) as seconds:
            load_owned(self._records, Sampler, sampler_id, caller)
            own = f"{sampler_id}:"
            self._note_poll(own)
            self._completions.acknowledge(id_ for id_ in asked["retrieved_request_ids"] if id_.startswith(own))
            target = ids.poll_target(sampler_id, asked["target"]["cloned_sampler_id"])
            timeout = asked.get("timeout")
            held = seconds if timeout is None else min(seconds, timeout)
            return self._wait(caller, target, asked["prev_cursor"], held)

    def _wait(self, caller: Caller, target: str, cursor: int, seconds: float) -> tuple[list[Completion], int]:
        found: tuple[list[Completion], int] = [], cursor

        def is_any() -> bool:
            nonlocal found
            found = self._completions.since(target, cursor)
            return bool(found[0])

        if seconds:
            self._waiter.wait(target, seconds, is_any)
            if not found[0]:
                self._check_key(caller)
        return found if found[0] else self._completions.since(target, cursor)


class FutureFinder:
    """Finds any future: those of the journal, and those of calls for which nothing has to run.

    A call of the second kind has only the record that it created or marked, and its future is done while that record
    exists.
    """

    def __init__(self, oplog: RedisOpLog, store: RedisRecords) -> None:
        self._oplog, self._records = oplog, store

    def future(self, request_id: str, caller: Caller) -> Future:
        """The future. Raises NotFound for an unknown or foreign id (with the same text), and Gone for an expired
        one."""
        model_id = ids.unloaded_by(request_id)
        if model_id is not None:
            return self._done(request_id, caller, Model, model_id, UNLOAD, "model_id")
        if ids.is_loss_id(request_id):
            return self._done(request_id, caller, Loss, request_id, CUSTOM_LOSS, "loss_id")
        # A read by a viewer leaves the result in place for the client that waits for it.
        viewed = {project for project in caller.roles if not caller.may("member", project)}
        return self._oplog.future(request_id, caller.roles.keys(), viewed)

    def _done(self, request_id: str, caller: Caller, cls: type[Owned], key: str, kind: str, named: str) -> Future:
        try:
            owner = load_readable(self._records, cls, key, caller).owner
        except NotFound:
            raise NotFound(f"no future {request_id!r}") from None
        return Future(request_id, kind, "", owner, "done", Result(json.dumps({"type": kind, named: key}).encode()))


class LongPollLimiter:
    """Limits and counts long polls. A poll is never refused; above the capacity it is answered sooner.

    The projects that poll now share the capacity equally. A project within its share is also held above the capacity,
    which others may have filled before: their next polls are held for a moment only, until they are back at their
    share.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
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
                    f"{self._settings.poll_capacity} polls already wait for results on this server, and project "
                    f"{project} has its share of them; try again soon"
                )
            yield

    def _seconds(self, project: str) -> float:
        """The hold time of the project's newest poll. Half of the spare threads takes polls above the capacity, and
        another quarter those of projects within their share."""
        full = self._settings.poll_hold_s
        if self._has_place(project):
            return full
        most = self._settings.poll_capacity + self._settings.spare_threads // 2
        return min(_SHORT_HOLD_S, full) if self._open.total() <= most else 0.0

    def _has_place(self, project: str) -> bool:
        """True if the project's newest poll is held in full."""
        capacity, polls = self._settings.poll_capacity, self._open.total()
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
        future = self._futures.future(request_id, caller)
        check_role(caller, future.owner)
        if future.kind != "sample":
            raise BadRequest(
                f"{request_id} is the future of {future.kind}, and only sampling requests can be cancelled: a model's "
                "calls run in seq order, and the calls after this one rely on it. To end all waiting calls of a run, "
                "delete the run (DELETE /api/v1/training_runs/<run>); its checkpoints stay"
            )
        if future.result is None:
            self._oplog.cancel_sample(request_id)

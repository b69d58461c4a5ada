"""Held polls: for one future, or for all that a client of a sampling session waits for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from app import ids
from app.domain.identity import Caller
from app.domain.records import Sampler
from app.errors import NotFound
from app.services.holds import Holds
from app.services.ownership import load_owned
from app.stores.interfaces import Completion, Completions, Future, Records
from app.stores.redis.waiting import Waiter

_REQUEST_ID = re.compile(r".+:\d{1,19}")


def check_request_id(text: str) -> None:
    """Raises NotFound for what no future can be called."""
    if not _REQUEST_ID.fullmatch(text):
        raise NotFound(f"no future {text[:200]!r}")


class Futures(Protocol):
    def future(self, request_id: str, caller: Caller) -> Future:
        """Raises NotFound for an unknown or foreign id (alike), Gone for an expired one."""
        ...


class PollService:
    """`waiter` wakes a poll when its result is there."""

    def __init__(self, futures: Futures, waiter: Waiter, holds: Holds) -> None:
        self._futures, self._waiter, self._holds = futures, waiter, holds

    def wait(self, request_id: str, caller: Caller) -> Future:
        """The future, once it is terminal or the hold is over. Raises NotFound or Gone."""
        check_request_id(request_id)
        with self._holds.hold() as seconds:
            return self._wait(request_id, caller, seconds)

    def _wait(self, request_id: str, caller: Caller, seconds: float) -> Future:
        found = None

        def is_done() -> bool:
            nonlocal found
            found = self._futures.future(request_id, caller)
            return found.result is not None

        if seconds:
            self._waiter.wait(request_id, seconds, is_done)
        return found if found and found.result else self._futures.future(request_id, caller)


class BatchPollService:
    """One poll for all requests of a client, so that it needs one connection however many samples it waits for."""

    def __init__(self, completions: Completions, store: Records, waiter: Waiter, holds: Holds) -> None:
        self._completions, self._records, self._waiter, self._holds = completions, store, waiter, holds

    def wait(self, caller: Caller, asked: Mapping[str, Any]) -> tuple[list[Completion], int]:
        """What came to its end behind `prev_cursor`, once there is something or the hold is over; and the next cursor.

        Raises NotFound (sampler).
        """
        sampler_id = asked["target"]["sampling_session_id"]
        with self._holds.hold() as seconds:
            load_owned(self._records, Sampler, sampler_id, caller)
            own = f"{sampler_id}:"
            self._completions.acknowledge(id_ for id_ in asked["retrieved_request_ids"] if id_.startswith(own))
            target = ids.poll_target(sampler_id, asked["target"]["cloned_sampler_id"])
            timeout = asked.get("timeout")
            return self._wait(target, asked["prev_cursor"], seconds if timeout is None else min(seconds, timeout))

    def _wait(self, target: str, cursor: int, seconds: float) -> tuple[list[Completion], int]:
        found: tuple[list[Completion], int] = [], cursor

        def is_any() -> bool:
            nonlocal found
            found = self._completions.since(target, cursor)
            return bool(found[0])

        if seconds:
            self._waiter.wait(target, seconds, is_any)
        return found if found[0] else self._completions.since(target, cursor)

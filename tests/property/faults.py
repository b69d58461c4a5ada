"""Faults at a worker's calls to the outside: it dies, an answer is lost, or it sleeps while others go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import redis

from app.errors import Unavailable


class Crash(BaseException):
    """kill -9: nothing catches it, and every cleanup finds every call dead too."""


class Fault(Enum):
    NONE = "none"
    DIES_BEFORE = "dies before the call"
    DIES_AFTER = "dies after the call"
    LOST_BEFORE = "the call is lost"
    LOST_AFTER = "the call's answer is lost"
    SLEEPS_BEFORE = "sleeps before the call"
    SLEEPS_AFTER = "sleeps after the call"


class DeviceError(Exception):
    """Error of a backend whose device fails."""


_ERRORS: dict[str, Callable[[], Exception]] = {
    "oplog": lambda: redis.ConnectionError("away"),
    "store": lambda: Unavailable("away"),
    "backend": lambda: DeviceError("out of memory"),
}
# Calls that hardly can fail.
_NEVER_LOST = ("backend.close", "backend.healthy")


@dataclass
class Faults:
    """Faults of one worker: `fault` happens once, at the call that `at` picks.

    `at` is the call's number from now on, or its name. `meanwhile` is what others do while the worker sleeps. `hit`
    counts the faults that really happened, over all workers.
    """

    hit: Counter[Fault]
    fault: Fault = Fault.NONE
    at: int | str = 0
    meanwhile: Callable[[], None] = lambda: None
    dead: bool = False
    calls: list[str] = field(default_factory=list)

    def plan(self, fault: Fault, at: int | str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.fault, self.at, self.meanwhile = fault, at, meanwhile
        self.calls.clear()

    def proxy(self, part: str, target: Any) -> Any:
        return _Proxy(self, part, target)

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            raise Crash
        self.calls.append(name)
        if self.fault is Fault.NONE or self.at not in (len(self.calls) - 1, name):
            return function(*args, **kwargs)
        fault, self.fault = self.fault, Fault.NONE
        self.hit[fault] += 1
        return self._fail(fault, name, partial(function, *args, **kwargs))

    def _fail(self, fault: Fault, name: str, call: Callable[[], Any]) -> Any:
        if fault is Fault.SLEEPS_BEFORE:
            self.meanwhile()
        answer = None if fault in (Fault.DIES_BEFORE, Fault.LOST_BEFORE) else call()
        if fault in (Fault.DIES_BEFORE, Fault.DIES_AFTER):
            self.dead = True
            raise Crash
        if fault in (Fault.LOST_BEFORE, Fault.LOST_AFTER) and name not in _NEVER_LOST:
            raise _ERRORS[name.partition(".")[0]]()
        if fault is Fault.SLEEPS_AFTER:
            self.meanwhile()
        return answer


class _Proxy:
    def __init__(self, faults: Faults, part: str, target: Any) -> None:
        self._faults, self._part, self._target = faults, part, target

    def __getattr__(self, name: str) -> Any:
        return partial(self._faults.call, f"{self._part}.{name}", getattr(self._target, name))

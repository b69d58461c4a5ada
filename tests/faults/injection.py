"""Recording proxies around a worker's stores and backend. They can end or stop the process at any call."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Literal

from app.domain.ops import ForwardBackward
from app.domain.results import ForwardBackwardOutput

# Calls of background threads at any time, or calls for display only: they are no step of a run.
_BESIDE = {"renew", "lead", "pending", "describe", "healthy", "heads", "unowned"}
# Ids that differ between two runs: the model's, and the worker's "node/boot".
_OWN_IDS = re.compile(r"[\w-]+:train:\d+|\S+/[0-9a-f]{8}$")
EXIT_STATUS = 9


@dataclass(frozen=True, slots=True)
class Call:
    """The `nth` call (from 1) of this name: part, method, and a detail that tells uses apart, such as a seq."""

    name: str
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at a call: before it has any effect, or after its effect but before its answer is seen.

    `name` may hold `*`; `nth` 0 means every such call. "stop" is SIGSTOP. After "stray" the next batch gives different
    numbers too, because a missing guard must not hide behind a backend that computes the same bits again.
    """

    name: str
    when: Literal["before", "after"]
    what: Literal["exit", "stop", "stray"] = "exit"
    nth: int = 1

    def strikes(self, call: Call) -> bool:
        return fnmatchcase(call.name, self.name) and self.nth in (0, call.nth)


class FaultInjector:
    """Records every call in order in `calls`.

    Threads may be interleaved in any way; names and numbers stay the same.
    """

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._strays = False
        self.calls: list[Call] = []

    def over(self, part: str, target: Any) -> Any:
        """Wraps `target` in a recording proxy."""
        return _Proxy(self, part, target)

    def wrap(self, part: str, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            here = self._note(_name(part, method, args))
            self._strike(here, "before")
            try:
                return self._stray(function(*args, **kwargs))
            finally:
                self._strike(here, "after")

        return call

    def _note(self, name: str) -> Call:
        with self._lock:
            self._seen[name] += 1
            call = Call(name, self._seen[name])
            self.calls.append(call)
            return call

    def _strike(self, call: Call, when: str) -> None:
        for fault in self._faults:
            if fault.when == when and fault.strikes(call):
                if fault.what == "exit":
                    os._exit(EXIT_STATUS)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._strays = fault.what == "stray"

    def _stray(self, answer: Any) -> Any:
        if not self._strays or not isinstance(answer, Mapping) or not all(map(_is_batch, answer.values())):
            return answer
        self._strays = False
        return {key: replace(output, metrics={**output.metrics, "stray:sum": 1.0}) for key, output in answer.items()}


class _Proxy:
    def __init__(self, injector: FaultInjector, part: str, target: Any) -> None:
        self._injector, self._part, self._target = injector, part, target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name.startswith("_") or name in _BESIDE or not callable(found):
            return found
        return self._injector.wrap(self._part, name, found)


def _is_batch(output: Any) -> bool:
    return isinstance(output, ForwardBackwardOutput)


def _name(part: str, method: str, args: tuple[Any, ...]) -> str:
    words = [text for arg in args for text in _words(arg)]
    return " ".join([f"{part}.{method}", *words])


def _words(arg: Any) -> list[str]:
    if isinstance(arg, str):
        return [text] if (text := _OWN_IDS.sub("", arg)) else []
    if isinstance(arg, int):
        return [str(arg)]
    if isinstance(arg, Mapping):  # of a backend's Ops; or a commit's counts, which identify nothing
        return [_op(op) for op in arg.values() if not isinstance(op, int)]
    return []


def _op(op: Any) -> str:
    """A backend gets no seq; the batch's length tells one forward_backward from another."""
    tokens = f"-{len(op.batch.tokens.values)}" if isinstance(op, ForwardBackward) else ""
    return f"{type(op).__name__}{tokens}"

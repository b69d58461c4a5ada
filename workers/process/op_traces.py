"""Spans of the Ops that a worker runs, below the span of the request that admitted each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from app.stores.redis.types import Entry
from app.tracing.requests import described
from app.tracing.tracer import Attributes, Tracer

_LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class _Attempt:
    context: str
    attributes: Attributes
    began: float


class OpTraces:
    """Records the spans of attempts. `context_of(request id)` is the context in a future's record. May be used from any
    thread."""

    def __init__(self, tracer: Tracer, context_of: Callable[[str], str]) -> None:
        self._tracer, self._find = tracer, context_of
        self._running: dict[str, _Attempt] = {}

    def started(self, entry: Entry, project: str) -> None:
        """An attempt begins; its wait is over."""
        context, now = self._context_of(entry.request_id), time.time()
        if context:
            attributes = described(entry.request_id, entry.kind) | {"tinsmith.project": project}
            self._running[entry.request_id] = _Attempt(
                context, attributes | {"tinsmith.lost_attempts": entry.attempts}, now
            )
            self._tracer.record("queue", context, now - entry.waited_s, now, attributes)

    def restored(self, request_id: str, seconds: float) -> None:
        """A model was restored for the Op."""
        context, now = self._context_of(request_id), time.time()
        if context:
            self._tracer.record("restore", context, now - seconds, now, {"tinsmith.request_id": request_id})

    def abandoned(self, request_id: str, why: str) -> None:
        """The attempt ended without a result."""
        attempt = self._running.pop(request_id, None)
        if attempt:
            failure = why[:_LONGEST_REASON]
            self._tracer.record("run", attempt.context, attempt.began, time.time(), attempt.attributes, failure)

    def ended(self, request_id: str, *, failed: bool, run_s: float, commit_s: float, ops_in_pass: int) -> None:
        """The result was committed just now."""
        attempt = self._running.pop(request_id, None)
        if attempt:
            now, attributes = time.time(), {**attempt.attributes, "tinsmith.ops_in_pass": ops_in_pass}
            failure = "the call failed" if failed else ""
            self._tracer.record("run", attempt.context, attempt.began, attempt.began + run_s, attributes, failure)
            self._tracer.record("commit", attempt.context, now - commit_s, now, attempt.attributes)

    def close(self) -> None:
        self._tracer.flush()

    def _context_of(self, request_id: str) -> str:
        with contextlib.suppress(redis.RedisError):
            return self._find(request_id)
        return ""

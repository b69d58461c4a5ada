"""Sampling requests that nobody was rung for, as their projects have enough under way: rung for as others end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis

from app import doorbell
from app.stores.interfaces import OpLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """Of a queue. `ring(kind, request id, sampling session id, queue)` is the doorbell; `ahead()` names the projects
    whose turns are not due, the one that had most last."""

    oplog: OpLog
    ring: Callable[[str, str, str, str], None]
    queue: str
    ahead: Callable[[], Sequence[str]] = tuple

    def ring_next(self) -> None:
        """As many as there is room for. While the state server is away none: the sweeper does the same later."""
        try:
            due = self.oplog.release_samples(self.queue, self.ahead())
        except redis.RedisError as error:
            log.warning("could not ring for the next requests: %s", error)
            return
        for request_id, node in due:
            queue = doorbell.direct_queue(self.queue, node) if node else self.queue
            self.ring("sample", request_id, request_id.rpartition(":")[0], queue)

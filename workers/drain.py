"""How a trainer gives its models to the others when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from app import ids
from app.stores.interfaces import OpLog
from workers.owner import Owner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drain:
    """`ring(kind, request id, model id, queue)` is the doorbell; `queue` is the one all trainers of the base read."""

    oplog: OpLog
    owner: Owner
    ring: Callable[[str, str, str, str], None]
    queue: str

    def in_order(self, seconds: float) -> None:
        """Settle the models for about `seconds` in all, those used last first, then hand them over."""
        deadline = time.monotonic() + seconds
        for model_id in reversed(self.owner.residents()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                self.owner.settle(model_id, left)
            except Exception:
                log.exception("could not settle a model", extra={"model_id": model_id})
        self.hand_over()

    def hand_over(self) -> None:
        """Release all and ring for what waits there, so that nobody waits for a lease. Leaves the backend alone.

        An Op admitted before its lease was released is among what waits; one that comes later finds no owner to ring.
        """
        residents = self.owner.residents()
        self.owner.release_all()
        try:
            for model_id, resident in residents.items():
                for seq, kind in enumerate(self.oplog.waiting(model_id, resident.applied + 1), resident.applied + 1):
                    self.ring(kind, ids.request_id(model_id, seq), model_id, self.queue)
        except redis.RedisError as error:
            log.warning("could not ring for what waits: %s", error)

"""Moves models between trainers: spreads them, drains a trainer that ends, and evicts those nobody uses.

A trainer that is rung first every time would take all models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import redis

from app import dispatch, ids
from app.domain import records
from app.domain.records import Worker
from app.domain.results import Result
from app.services.base_models import trainer_role
from app.stores.interfaces.journal import OpLog
from app.stores.interfaces.records import Records
from workers.process.results import NotNow
from workers.train.owner import Owner
from workers.train.runner import TrainingRunner
from workers.train.scheduler import Parked

log = logging.getLogger(__name__)
_AT_ONCE_S = 5.0


class Spread:
    """Handles doorbells of the queue that all trainers read: passes a model nobody has to the one with the fewest.

    What the Worker records say is up to a beat old, and a trainer they name may just have died. So a model is passed on
    once, to a queue of that trainer alone, and the sweeper sees to one that is not there to listen.
    """

    def __init__(
        self,
        runner: TrainingRunner,
        owner: Owner,
        stored: Records,
        ring: Callable[[str, str, str, str], None],
        base_model: str,
        node: str,
        *,
        full: bool = False,
    ) -> None:
        self._runner, self._owner, self._records, self._ring = runner, owner, stored, ring
        self._base_model, self._node = base_model, node
        self._role, self._queue = trainer_role(full=full), dispatch.train_queue(base_model, full=full)

    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        """See TrainingRunner.handle."""
        lighter = self._lighter(model_id)
        if lighter is None:
            return self._runner.handle(request_id, model_id, kind)
        self._ring(kind, request_id, model_id, dispatch.direct_queue(self._queue, lighter))
        raise NotNow(f"{lighter} has fewer models than {self._node}")

    def _lighter(self, model_id: str) -> str | None:
        mine = self._owner.residents()
        if not mine or model_id in mine:
            return None
        others = self._others()
        lightest = min(others, key=lambda node: others[node], default=self._node)
        return lightest if others.get(lightest, len(mine)) < len(mine) else None

    def _others(self) -> dict[str, int]:
        """Models of each other healthy trainer of the base."""
        workers = ((node, records.load(Worker, fields)) for node, fields in self._records.list(Worker.namespace))
        return {
            node: int(worker.describe.get("models", 0))
            for node, worker in workers
            if (worker.role, worker.base_model) == (self._role, self._base_model)
            and worker.healthy
            and node != self._node
        }


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


@dataclass(frozen=True, slots=True)
class Tidying:
    """`unwanted(model ids)` names those whose session is over, and those that were deleted; `incomplete()` those whose
    journal has to run again, since something was lost that it alone can make anew."""

    owner: Owner
    parked: Parked
    unwanted: Callable[[Collection[str]], set[str]]
    idle_s: float
    incomplete: Callable[[], Collection[str]] = tuple

    def __call__(self) -> None:
        self.parked.ring_due()
        for model_id in self.incomplete():
            self.owner.discard(model_id)
        self._let_go()

    def _let_go(self) -> None:
        """Saving states takes time in which nothing else runs here, so what takes long is left for the next tick."""
        residents = self.owner.residents()
        unwanted = self.unwanted(residents) if residents else set()
        started = time.monotonic()
        for model_id, resident in residents.items():
            if model_id in unwanted or started - resident.used > self.idle_s:
                self.owner.part_with(model_id)
                if time.monotonic() - started > _AT_ONCE_S:
                    return

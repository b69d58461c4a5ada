"""Rebalances models between trainers, drains a trainer that ends, and evicts idle models.

Without this, a trainer that always takes the first dispatch would own all models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass

import redis

from app import dispatch, ids
from app.domain.records import Worker
from app.domain.results import Result
from app.errors import Requeue
from app.services.base_models import trainer_role
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, load
from workers.train.owner import Owner, Resident
from workers.train.runner import TrainingRunner

log = logging.getLogger(__name__)
_AT_ONCE_S = 5.0


class Rebalancer:
    """Rebalances models. Handles dispatches of the queue that all trainers read, and forwards a model without an owner
    to the trainer with the fewest models.

    The Worker records may be one heartbeat old, and a trainer they name may have just died. So a model is forwarded
    once, to a queue that only that trainer reads. The redispatch task handles a trainer that is not there.
    """

    def __init__(
        self,
        runner: TrainingRunner,
        owner: Owner,
        records: RedisRecords,
        send: dispatch.Send,
        base_model: str,
        node: str,
        *,
        full: bool = False,
    ) -> None:
        self._runner, self._owner, self._records, self._send = runner, owner, records, send
        self._base_model, self._node = base_model, node
        self._role, self._queue = trainer_role(full=full), dispatch.train_queue(base_model, full=full)

    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        """Handles one dispatch; see TrainingRunner.handle."""
        lighter = self._lighter(model_id)
        if lighter is None:
            return self._runner.handle(request_id, model_id, kind)
        self._send(kind, request_id, model_id, dispatch.direct_queue(self._queue, lighter))
        raise Requeue(f"{lighter} has fewer models than {self._node}")

    def _lighter(self, model_id: str) -> str | None:
        """The trainer with the fewest models, if this one has more and does not own the model."""
        mine = self._owner.residents()
        if not mine or model_id in mine:
            return None
        lighter = {node: models for node, models in self._others().items() if models < len(mine)}
        return min(lighter, key=lambda node: lighter[node], default=None)

    def _others(self) -> dict[str, int]:
        """Number of models of each other healthy trainer of the base."""
        workers = ((node, load(Worker, fields)) for node, fields in self._records.list(Worker.namespace))
        return {
            node: int(worker.describe.get("models", 0))
            for node, worker in workers
            if (worker.role, worker.base_model) == (self._role, self._base_model)
            and worker.healthy
            and node != self._node
        }


@dataclass(frozen=True, slots=True)
class Drain:
    """Releases all models of a trainer that ends, and dispatches their waiting Ops again.

    All trainers of the base read `queue`.
    """

    oplog: RedisOpLog
    owner: Owner
    send: dispatch.Send
    queue: str

    def settle_and_release(self, seconds: float) -> None:
        """Settles the models, the last used first, for about `seconds` in all; then releases them."""
        deadline, residents = time.monotonic() + seconds, self.owner.residents()
        for model_id in reversed(residents):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                self.owner.settle(model_id, left)
            except Exception:
                log.exception("could not save a model's state before its release", extra={"model_id": model_id})
        self._release(residents)  # also those whose state a commit discarded meanwhile

    def release(self) -> None:
        """Releases all models and dispatches their waiting Ops, so that none waits for a lease. Leaves the backend
        alone.

        An Op admitted before the release is among the waiting ones. An Op admitted later finds no owner to be
        dispatched to.
        """
        self._release(self.owner.residents())

    def _release(self, residents: Mapping[str, Resident]) -> None:
        self.owner.release_all()
        try:
            for model_id, resident in residents.items():
                for seq, kind in enumerate(self.oplog.waiting(model_id, resident.applied + 1), resident.applied + 1):
                    self.send(kind, ids.request_id(model_id, seq), model_id, self.queue)
        except redis.RedisError as error:
            log.warning("could not dispatch the waiting calls of released models: %s", error)


@dataclass(frozen=True, slots=True)
class IdleEviction:
    """Evicts idle and unwanted models, and discards those whose journal has to run again.

    `unwanted(model ids)` returns the deleted models and those whose session is over. `incomplete()` returns the models
    whose journal has to run again, because only the journal can rebuild something that was lost.
    """

    owner: Owner
    unwanted: Callable[[Collection[str]], set[str]]
    idle_s: float
    incomplete: Callable[[], Set[str]]

    def __call__(self) -> None:
        for model_id in self.owner.residents().keys() & self.incomplete():
            self.owner.discard(model_id)
        self._evict_idle()

    def _evict_idle(self) -> None:
        """Evicts unwanted and idle models. Nothing else runs here while a state is saved, so slow evictions wait for
        the next tick."""
        residents = self.owner.residents()
        unwanted = self.unwanted(residents) if residents else set()
        started = time.monotonic()
        for model_id, resident in residents.items():
            if model_id in unwanted or started - resident.used > self.idle_s:
                self.owner.evict(model_id)
                if time.monotonic() - started > _AT_ONCE_S:
                    return

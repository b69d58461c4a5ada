"""Spreads models over the trainers of a base: a trainer that is rung first every time would take them all."""

from __future__ import annotations

from collections.abc import Callable

from app import doorbell
from app.domain import records
from app.domain.records import Worker
from app.domain.results import Result
from app.services.base_models import trainer_role
from app.stores.interfaces import Records
from workers.outcome import NotNow
from workers.owner import Owner
from workers.runner import TrainingRunner


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
        self._role, self._queue = trainer_role(full=full), doorbell.train_queue(base_model, full=full)

    def handle(self, request_id: str, model_id: str, kind: str) -> Result | None:
        """See TrainingRunner.handle."""
        lighter = self._lighter(model_id)
        if lighter is None:
            return self._runner.handle(request_id, model_id, kind)
        self._ring(kind, request_id, model_id, doorbell.direct_queue(self._queue, lighter))
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

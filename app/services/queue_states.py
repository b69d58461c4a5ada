"""Whether what a poll waits for moves on, in the words the SDK knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from app.domain import records
from app.domain.records import Model, Sampler
from app.services.base_models import sampler_role, trainer_role
from app.services.queue_looks import Look, QueueLooks
from app.services.standings import Place, describe
from app.stores.interfaces import Future, Records

_LOOK_S = 2.0
_PARENTS = 4096


@dataclass(frozen=True, slots=True)
class QueueState:
    """`reason` is for the user: why it is paused, or what runs before it. The SDK logs it while it is paused."""

    name: str
    reason: str = ""
    place: Place | None = None


ACTIVE = QueueState("active")


class QueueStates:
    """Asked only when a hold ends, of which 2,000 may do so within seconds: a look at everything serves all polls for a
    moment, and whose worker a future needs never changes."""

    def __init__(self, looks: QueueLooks, store: Records) -> None:
        self._looks, self._records = looks, store
        self._needs = lru_cache(_PARENTS)(self._find_needed)

    def of(self, future: Future) -> QueueState:
        """Of a future that is still pending."""
        look = self._looks.newest(_LOOK_S)
        return self.at(look, future.request_id, future.kind, future.model_id) if look else ACTIVE

    def at(self, look: Look, request_id: str, kind: str, parent_id: str) -> QueueState:
        """The same, as of a look; `parent_id` is its model or sampler."""
        needed = self._needs(kind == "sample", parent_id)
        place = look.standings.of(request_id)
        if needed and needed not in look.live:
            role, base = needed
            return QueueState("paused_capacity", f"no {role.replace('_', ' ')} of {base} is running", place)
        if look.shortage:
            return QueueState("paused_capacity", f"the server takes in no more work for now: {look.shortage}", place)
        return QueueState(ACTIVE.name, describe(place), place) if place else ACTIVE

    def _find_needed(self, sample: bool, parent_id: str) -> tuple[str, str] | None:
        """(role, base model) of the workers that run it."""
        stored = self._records.get(Sampler.namespace if sample else Model.namespace, parent_id)
        if stored is None:
            return None
        if sample:
            sampler = records.load(Sampler, stored)
            return sampler_role(full=sampler.full), sampler.base_model
        model = records.load(Model, stored)
        return trainer_role(full=model.full), model.base_model

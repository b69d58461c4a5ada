"""What calls take that are not journalled, and what a project and a key have left."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from app.domain.identity import Caller
from app.domain.limits import Charge, Payer
from app.services.limits import LimitsOf
from app.services.lists import check_seen
from app.stores.interfaces import Allowances


class AllowanceService:
    """What reads counts for nothing, nor what lets go of something: a limit must not keep it from going.

    The first three raise TooManyRequests where the call may come again, LimitReached where something has to go first.
    """

    def __init__(self, limits: LimitsOf, allowances: Allowances) -> None:
        self._limits, self._allowances = limits, allowances

    def take(self, caller: Caller, project: str) -> None:
        """A call that makes or changes something in `project`."""
        self._allowances.take(Charge(self._limits.payers(caller, project)))

    def copy(self, caller: Caller, project: str, size: int) -> None:
        """One that makes a checkpoint of `size` bytes there."""
        self._allowances.take(Charge(self._limits.payers(caller, project), stores=True, stored=size))

    def move(self, caller: Caller, project: str, models: int, size: int) -> None:
        """One that brings what another project had; what is in it counts for the keys that made it, as before."""
        payer, key = self._limits.payers(caller, project)
        rates = replace(key, limits=key.limits.changed({"live_models": None, "storage_bytes": None}))
        self._allowances.take(Charge((payer, rates), models=models, stores=size > 0, stored=size))

    def most_samples(self, caller: Caller, most: int) -> int:
        """How many samples a client should have under way, where the server has places for `most`."""
        own = [payer.limits.concurrent_samples for payer in self._limits.payers(caller, caller.project)]
        return min([most, *(limit for limit in own if limit is not None)])

    def describe(self, caller: Caller, project: str | None) -> dict[str, Any]:
        """The body of GET limits, of his key and its project or another. Raises NotFound for one he does not see, as
        his key's own once he was taken out of it."""
        named = check_seen(caller, caller.project if project is None else project)
        return {payer.kind: self._view(payer) for payer in self._limits.payers(caller, named)}

    def _view(self, payer: Payer) -> dict[str, Any]:
        return {"id": payer.id, "limits": asdict(payer.limits), "used": asdict(self._allowances.used(payer))}

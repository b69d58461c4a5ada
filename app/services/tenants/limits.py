"""Limits: finds the ones that hold for a caller, charges calls that have no journal entry, and shows the rest."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any, TypeVar

from app.domain import records
from app.domain.accounts import Caller, Key, Project
from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.services.views import check_seen
from app.stores.interfaces.records import Allowances, Records

_CACHED_S = 5.0
_NONE = Limits()
A = TypeVar("A", Project, Key)


class LimitsOf:
    """Asked at every call, and by workers: what was found holds for some seconds, in which a change is not seen.

    `default` are those of every project. A key has none of its own unless it was given some.
    """

    def __init__(self, store: Records, default: Limits) -> None:
        self._records, self._default = store, default
        self._found: dict[tuple[str, str], tuple[float, Limits]] = {}

    def project(self, project: str) -> Limits:
        """Also of one that is no account: a key of the settings is a project of its own."""
        return self._cached(Project, project, self._default)

    def key(self, key: str) -> Limits:
        """By its id."""
        return self._cached(Key, key, _NONE)

    def payers(self, caller: Caller, project: str) -> tuple[Payer, ...]:
        """Whom a call of the caller's counts for that is about something of `project`."""
        return self.payer(project), Payer(KEY, caller.key_id, self.key(caller.key_id))

    def payer(self, project: str) -> Payer:
        """The project alone."""
        return Payer(PROJECT, project, self.project(project))

    def _cached(self, cls: type[A], id_: str, default: Limits) -> Limits:
        until, limits = self._found.get((cls.namespace, id_), (0.0, default))
        if time.monotonic() >= until:
            stored = self._records.get(cls.namespace, id_)
            limits = default.changed(records.load(cls, stored).limits) if stored else default
            self._found[cls.namespace, id_] = time.monotonic() + _CACHED_S, limits
        return limits


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

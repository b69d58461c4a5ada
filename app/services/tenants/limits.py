"""Limits: finds the limits of a caller, charges calls that have no journal entry, and shows limits and use."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any, TypeVar

from app.domain import records
from app.domain.accounts import Caller, Key, Project
from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.services.views import check_seen
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords

_CACHED_S = 5.0
_NONE = Limits()
A = TypeVar("A", Project, Key)


class LimitsOf:
    """Finds the limits of projects and keys. Every call and the workers use it, so results are cached for some seconds,
    and a change takes effect only after that.

    `default` are the limits of every project. A key has no limits of its own unless some were set.
    """

    def __init__(self, store: RedisRecords, default: Limits) -> None:
        self._records, self._default = store, default
        self._found: dict[tuple[str, str], tuple[float, Limits]] = {}

    def project(self, project: str) -> Limits:
        """The project's limits; also for a project without an account, because each key of the settings is its own
        project."""
        return self._cached(Project, project, self._default)

    def key(self, key: str) -> Limits:
        """The key's limits, by its id."""
        return self._cached(Key, key, _NONE)

    def payers(self, caller: Caller, project: str) -> tuple[Payer, ...]:
        """The payers of a caller's call on something of `project`: that project and the caller's key."""
        return self.payer(project), Payer(KEY, caller.key_id, self.key(caller.key_id))

    def payer(self, project: str) -> Payer:
        """The project as the only payer."""
        return Payer(PROJECT, project, self.project(project))

    def _cached(self, cls: type[A], id_: str, default: Limits) -> Limits:
        until, limits = self._found.get((cls.namespace, id_), (0.0, default))
        if time.monotonic() >= until:
            stored = self._records.get(cls.namespace, id_)
            limits = default.changed(records.load(cls, stored).limits) if stored else default
            self._found[cls.namespace, id_] = time.monotonic() + _CACHED_S, limits
        return limits


class QuotaService:
    """Charges calls against limits. Reads cost nothing, and neither do calls that free something, because a limit must
    not prevent freeing.

    The first three methods raise TooManyRequests if the call can be repeated later, and LimitReached if something must
    be freed first.
    """

    def __init__(self, limits: LimitsOf, quotas: RedisQuotas) -> None:
        self._limits, self._quotas = limits, quotas

    def take(self, caller: Caller, project: str) -> None:
        """Charges a call that creates or changes something in `project`."""
        self._quotas.take(Charge(self._limits.payers(caller, project)))

    def copy(self, caller: Caller, project: str, size: int) -> None:
        """Charges a call that creates a checkpoint of `size` bytes in `project`."""
        self._quotas.take(Charge(self._limits.payers(caller, project), stores=True, stored=size))

    def move(self, caller: Caller, project: str, models: int, size: int) -> None:
        """Charges a call that moves another project's session to `project`. Its models and checkpoints still count for
        the keys that created them."""
        payer, key = self._limits.payers(caller, project)
        rates = replace(key, limits=key.limits.changed({"live_models": None, "storage_bytes": None}))
        self._quotas.take(Charge((payer, rates), models=models, stores=size > 0, stored=size))

    def most_samples(self, caller: Caller, most: int) -> int:
        """The number of samples that a client should have in flight, at most `most`, the server's capacity."""
        own = [payer.limits.concurrent_samples for payer in self._limits.payers(caller, caller.project)]
        return min([most, *(limit for limit in own if limit is not None)])

    def describe(self, caller: Caller, project: str | None) -> dict[str, Any]:
        """The body of GET limits, for the caller's key and for its own or another project. Raises NotFound for a
        project that the caller does not see; this includes the key's own project once the caller was removed from
        it."""
        named = check_seen(caller, caller.project if project is None else project)
        return {payer.kind: self._view(payer) for payer in self._limits.payers(caller, named)}

    def _view(self, payer: Payer) -> dict[str, Any]:
        return {"id": payer.id, "limits": asdict(payer.limits), "used": asdict(self._quotas.used(payer))}

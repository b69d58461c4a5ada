"""Limits of projects and keys: finding them, and charging calls against them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from app import ids
from app.domain.accounts import Caller, Key, Project
from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer
from app.domain.records import Upload
from app.services.tenants.spending import Spending
from app.services.views import check_seen
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump

RESERVED_S = 7200
"""The time for which the room of an upload is reserved."""
# Bytes a second, at which files of any size are stored. A model of 600 GB takes hours.
_SLOWEST = 10**7

_CACHED_S = 5.0
_NONE = Limits()
A = TypeVar("A", Project, Key)


class LimitsFinder:
    """Finds the limits of projects and keys. Every call and the workers use it, so it caches limits for some seconds. A
    change takes effect only after that.

    `default` are the limits of a project where its account sets no others. A key has no limits unless some were set.
    """

    def __init__(self, records: RedisRecords, default: Limits) -> None:
        self._records, self._default = records, default
        self._found: dict[tuple[str, str], tuple[float, Limits]] = {}

    def project(self, project: str) -> Limits:
        """Returns the limits of a project. A project without an account has the default limits, because each key of the
        settings is its own project."""
        return self._cached(Project, project, self._default)

    def may_have(self, name: str) -> bool:
        """Returns False if no project has the limit `name`. It reads no value, so it also works for accounts of a later
        version."""
        return getattr(self._default, name) is not None or any(
            f'"{name}"' in fields.get("limits", "") for _, fields in self._records.list(Project.namespace)
        )

    def key(self, key: str) -> Limits:
        """Returns the limits of the key with this id."""
        return self._cached(Key, key, _NONE)

    def payers(self, caller: Caller, project: str) -> tuple[Payer, ...]:
        """Returns the payers of a call on something of `project`: that project and the caller's key."""
        return self.payer(project), Payer(KEY, caller.key_id, self.key(caller.key_id))

    def payer(self, project: str) -> Payer:
        """Returns the project as a payer, for work that has no caller."""
        return Payer(PROJECT, project, self.project(project))

    def checkpoint_ttl_s(self, project: str) -> int | None:
        """Returns the TTL of a project's checkpoints that get none of their own; None if they do not expire. Limits
        that a later version set and this one cannot read give none: a trainer's other tenants go on."""
        try:
            return self.project(project).checkpoint_ttl_s
        except (TypeError, ValueError):
            return None

    def _cached(self, cls: type[A], id_: str, default: Limits) -> Limits:
        until, limits = self._found.get((cls.namespace, id_), (0.0, default))
        if time.monotonic() >= until:
            found = self._records.find(cls, id_)
            limits = default.changed(found.limits) if found else default
            self._found[cls.namespace, id_] = time.monotonic() + _CACHED_S, limits
        return limits


class QuotaService:
    """Charges calls against limits. Reads cost nothing, and neither do calls that free something, because a limit must
    not prevent freeing.

    `take`, `reserve` and `move` raise TooManyRequests if the call can be repeated later, and LimitReached if something
    must be freed first.
    """

    def __init__(self, limits: LimitsFinder, quotas: RedisQuotas, spending: Spending) -> None:
        self._limits, self._quotas, self._spending = limits, quotas, spending

    def take(self, caller: Caller, *projects: str) -> None:
        """Charges a call that creates or changes something in `projects`: once to each of them, and once to the key."""
        payers = dict.fromkeys(payer for project in projects for payer in self._limits.payers(caller, project))
        self._quotas.take(Charge(tuple(payers)))

    def of_session(self, caller: Caller, project: str) -> Charge:
        """The charge of a new session in `project`."""
        return Charge(self._limits.payers(caller, project), sessions=1)

    def reserve(
        self,
        caller: Caller | None,
        project: str,
        path: ids.TinkerPath,
        size: int,
        upload: tuple[str, Upload] | None = None,
    ) -> None:
        """Charges a call that creates a checkpoint of `size` bytes at `path` in `project`, and reserves the room for it
        until RedisRecords.put_reserved records it, for as long as its files may take. The caller is None for the
        operator. `upload`: an upload to record in the same step, with its id; a repeat charges nothing."""
        payers = self._limits.payers(caller, project) if caller else (self._limits.payer(project),)
        charge = Charge(payers, stores=True, stored=size)
        record = (upload[0], dump(upload[1])) if upload else None
        self._quotas.reserve(str(path), charge, RESERVED_S + size / _SLOWEST, record)

    @contextlib.contextmanager
    def releasing(self, path: ids.TinkerPath) -> Iterator[None]:
        """Releases the room reserved for `path` if the block fails."""
        try:
            yield
        except BaseException:
            self._quotas.release(str(path))
            raise

    def move(self, caller: Caller, project: str, *, sessions: int, models: int, size: int) -> None:
        """Charges a call that moves another project's session to `project`. The session, its models and its checkpoints
        still count for the keys that created them."""
        payer, key = self._limits.payers(caller, project)
        rates = replace(
            key, limits=key.limits.changed(dict.fromkeys(("live_models", "live_sessions", "storage_bytes")))
        )
        self._quotas.take(Charge((payer, rates), sessions=sessions, models=models, stores=size > 0, stored=size))

    def checkpoint_ttl_s(self, project: str) -> int | None:
        """Returns the TTL of a project's checkpoints that get none of their own; None if they do not expire."""
        return self._limits.checkpoint_ttl_s(project)

    def most_samples(self, caller: Caller, most: int) -> int:
        """The number of samples that a client should have in flight, at most `most`, the server's capacity."""
        own = [payer.limits.concurrent_samples for payer in self._limits.payers(caller, caller.project)]
        return min([most, *(limit for limit in own if limit is not None)])

    def describe(self, caller: Caller, project: str | None) -> dict[str, Any]:
        """The body of GET limits, for the caller's key and for its own or another project. Raises NotFound for a
        project that the caller does not see; this includes the key's own project once the caller was removed from
        it."""
        named = check_seen(caller, caller.project if project is None else project)
        return {payer.kind: self._view(payer, caller) for payer in self._limits.payers(caller, named)}

    def _view(self, payer: Payer, caller: Caller) -> dict[str, Any]:
        """A payer's limits and their use. Only a project's admins see its cost, unless it has a budget: the budget
        refuses calls of its members, so they see it too."""
        sees_cost = payer.limits.monthly_budget is not None or caller.may("admin", payer.id)
        spent = self._spending.this_month(payer.id) if payer.kind == PROJECT and sees_cost else None
        used = {**asdict(self._quotas.used(payer)), "monthly_budget": spent}
        return {"id": payer.id, "limits": asdict(payer.limits), "used": used}

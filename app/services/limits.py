"""Which limits hold: those of the settings, with what an account's own say on top."""

from __future__ import annotations

import time
from typing import TypeVar

from app.domain import records
from app.domain.accounts import Key, Project
from app.domain.identity import Caller
from app.domain.limits import KEY, PROJECT, Limits, Payer
from app.stores.interfaces import Records

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

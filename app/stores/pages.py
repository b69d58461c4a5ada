"""Hourly pages of the usage ledger and of the audit log: one page of each for every project and hour.

The state server holds the pages that are still written. A page is closed when its hour is over. It then moves
unchanged to the object store, as `<ledger>/<project>/<day>/<hour>.json`. lua/pages.lua writes the fields of a usage
page, and app/services/tenants/audit.py those of an audit page.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from app.domain.results import HOUR_S
from app.stores.objects.base import ObjectStore

log = logging.getLogger(__name__)
# Compressed: two weeks of 14 projects with 50 sessions an hour. Each report reads the pages in the same order, so that
# of more pages it finds none in memory.
_CACHED_BYTES = 2**25
# Of zlib's levels. A page shrinks to a seventh in 0.07 ms; the default level takes three times as long for an eighth.
_FASTEST = 1
Ledger = Literal["usage", "audit"]
LEDGERS: tuple[Ledger, ...] = get_args(Ledger)
Fields = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """The name of one page. `hour` counts hours since the beginning of 1970, UTC."""

    ledger: Ledger
    project: str
    hour: int

    @classmethod
    def parse(cls, text: str) -> LedgerPage:
        """Parses the text that `str` makes of a page."""
        ledger, project, hour = text.split("/")
        return cls("usage" if ledger == "usage" else "audit", project, int(hour))

    def __str__(self) -> str:
        return f"{self.ledger}/{self.project}/{self.hour}"


@dataclass(frozen=True, slots=True)
class StorageUse:
    """The byte-seconds that a project's checkpoints of one base model took in one hour."""

    project: str
    base_model: str
    hour: int
    byte_seconds: int


class PageFiles:
    """The closed pages in the object store. A closed page never changes, so each process reads it once and keeps the
    pages that it used last. All methods raise Unavailable while the object store is away."""

    def __init__(self, objects: ObjectStore, cached_bytes: int = _CACHED_BYTES) -> None:
        self._objects = objects
        self._cached = _Cache(cached_bytes)

    def add(self, page: LedgerPage, fields: Fields) -> None:
        """Stores a page. A page that exists already stays: it was stored before the state server was set back to an
        earlier state."""
        self._objects.put_new(_key(page), json.dumps(dict(fields), sort_keys=True).encode())

    def find(self, ledger: Ledger, project: str, hours: range) -> dict[LedgerPage, Fields]:
        """The stored pages of these hours. Leaves out a damaged page, and logs it."""
        wanted = {_key(page): page for page in (LedgerPage(ledger, project, hour) for hour in hours)}
        months = sorted({f"{_begin(hour):%Y-%m}" for hour in hours})  # one listing each, for any number of hours
        listed = (key for month in months for key in self._objects.list(f"{ledger}/{project}/{month}"))
        found = {wanted[key]: self._read(key) for key in listed if key in wanted}
        return {page: fields for page, fields in found.items() if fields is not None}

    def projects(self, ledger: Ledger) -> Sequence[str]:
        """The projects that have stored pages."""
        return self._objects.folders(f"{ledger}/")

    def _read(self, key: str) -> Fields | None:
        packed = self._cached.get(key)
        try:
            content = self._objects.read(key) if packed is None else zlib.decompress(packed)
            fields = json.loads(content)
            if isinstance(fields, dict) and all(isinstance(value, str) for value in fields.values()):
                self._cached.put(key, zlib.compress(content, _FASTEST) if packed is None else packed)
                return fields
        except ValueError:
            pass
        log.error("%s in the object store is damaged and was skipped: restore it from a backup", key)
        return None


class _Cache:
    """The objects that were used last, up to a number of bytes, for all threads."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._contents.get(key)

    def put(self, key: str, content: bytes) -> None:
        """Makes this object the one that was used last."""
        with self._lock:
            self._left += len(self._contents.pop(key, b"")) - len(content)
            self._contents[key] = content
            while self._left < 0:
                self._left += len(self._contents.popitem(last=False)[1])


def _key(page: LedgerPage) -> str:
    return f"{page.ledger}/{page.project}/{_begin(page.hour):%Y-%m-%d/%H}.json"


def _begin(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * HOUR_S, UTC)

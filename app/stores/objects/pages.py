"""Closed pages in the object store, where they are at home: `<book>/<project>/<day>/<hour>.json`, an object each."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

from app.domain.usage import HOUR_S
from app.stores.interfaces import ObjectStore
from app.stores.pages import Book, Fields, Page

log = logging.getLogger(__name__)


class PageFiles:
    """Both methods raise Unavailable while the object store is away."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def add(self, page: Page, fields: Fields) -> None:
        """Keep a page. One that is there stays: it was kept before, and the state server was set back since."""
        self._objects.put_new(_key(page), json.dumps(dict(fields), sort_keys=True).encode())

    def find(self, book: Book, project: str, hours: range) -> dict[Page, Fields]:
        """What is kept of these hours. What is damaged there is left out, and logged."""
        wanted = {_key(page): page for page in (Page(book, project, hour) for hour in hours)}
        listed = (key for month in _months(hours) for key in self._objects.list(f"{book}/{project}/{month}"))
        found = {wanted[key]: self._read(key) for key in listed if key in wanted}
        return {page: fields for page, fields in found.items() if fields is not None}

    def _read(self, key: str) -> Fields | None:
        try:
            fields = json.loads(self._objects.read(key))
            if isinstance(fields, dict) and all(isinstance(value, str) for value in fields.values()):
                return fields
        except ValueError:
            pass
        log.error("%s in the object store is damaged, and left out: restore it from a backup", key)
        return None


def _key(page: Page) -> str:
    return f"{page.book}/{page.project}/{_begin(page.hour):%Y-%m-%d/%H}.json"


def _months(hours: range) -> Iterator[str]:
    """One listing each, however many hours are asked for."""
    return iter(sorted({f"{_begin(hour):%Y-%m}" for hour in hours}))


def _begin(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * HOUR_S, UTC)

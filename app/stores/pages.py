"""Books of usage and of the audit log: a project has one page of each for every hour.

The state server holds the pages that are written; once its hour is over a page is closed, and goes to the object
store as it is, `<book>/<project>/<day>/<hour>.json`. A page's fields are those that lua/prelude.lua (usage) and
app/services/tenants/audit.py (audit) write.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol, get_args

from app.domain.results import HOUR_S
from app.stores.objects.base import ObjectStore

log = logging.getLogger(__name__)
Book = Literal["usage", "audit"]
BOOKS: tuple[Book, ...] = get_args(Book)
Fields = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Page:
    """`hour`: hours since the beginning of 1970, UTC."""

    book: Book
    project: str
    hour: int

    @classmethod
    def parse(cls, text: str) -> Page:
        """The inverse of `str`."""
        book, project, hour = text.split("/")
        return cls("usage" if book == "usage" else "audit", project, int(hour))

    def __str__(self) -> str:
        return f"{self.book}/{self.project}/{self.hour}"


@dataclass(frozen=True, slots=True)
class Held:
    """So many byte-seconds of a project's checkpoints of a base model, in an hour."""

    project: str
    base_model: str
    hour: int
    byte_seconds: int


class Pages(Protocol):
    """The pages at the state server. All hours are those of its clock."""

    def close(self, limit: int) -> list[Page]:
        """Close the pages of past hours, for good; so many of those that are closed."""
        ...

    def drop(self, page: Page) -> None:
        """A closed page has been kept elsewhere."""
        ...

    def find(self, book: Book, projects: Iterable[str], hours: range) -> dict[Page, Fields]:
        """What is there of these projects and hours."""
        ...

    def fields(self, page: Page) -> Fields:
        """Empty for a page that is not there."""
        ...

    def measured(self) -> float | None:
        """When the checkpoints' sizes were counted last, in unix seconds; None for never."""
        ...

    def measure(self, before: float | None, now: float, held: Iterable[Held]) -> bool:
        """Count what was held between two measurements; False (nothing changes) when `before` was not the last one."""
        ...


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


@dataclass(frozen=True, slots=True)
class Books:
    """Pages still at the state server, and those in the object store."""

    pages: Pages
    files: PageFiles

    def read(self, book: Book, projects: Iterable[str], hours: range) -> dict[Page, Fields]:
        """Every page once. The state server is asked first, or one on its way would be missed; one that is in both, on
        its way or because the state server was set back, is as the object store has it. Raises Unavailable."""
        of = list(projects)
        found = self.pages.find(book, of, hours)
        for project in of:
            found.update(self.files.find(book, project, hours))
        return found

"""Books: what is written down as it happens, and kept. A project has one page of each for every hour.

The state server holds the pages that are written; once its hour is over a page is closed, and goes to the object store
as it is (app/stores/objects/pages.py). A page's fields are those that lua/prelude.lua (usage) and app/services/audit.py
(audit) write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

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

"""What was written down of projects, wherever its pages lie by now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.stores.objects.pages import PageFiles
from app.stores.pages import Book, Fields, Page, Pages


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

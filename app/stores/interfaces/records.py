"""Small flat records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from app.stores.pages import Book

Record = Mapping[str, str]
Write = tuple[str, str, Record]
"""(namespace, id, fields): a record to set in the same atomic step as a commit."""


class Records(Protocol):
    """Small flat records by namespace and id: sessions, sampling sessions, checkpoints, workers."""

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None: ...

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        """False when there is one already (it stays). Raises Unavailable while there is no room for another."""
        ...

    def put_newer(self, namespace: str, key: str, version: int, fields: Record) -> bool:
        """Set a record with a field `version`; False (nothing changes) when that version or a later one is there."""
        ...

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        """Set fields of a record; False when there is none (none is made)."""
        ...

    def get(self, namespace: str, key: str) -> dict[str, str] | None: ...

    def delete(self, namespace: str, key: str) -> None: ...

    def delete_same(self, namespace: str, key: str, fields: Record) -> bool:
        """Delete a record that still says what was read of it; False when it has changed since."""
        ...

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Those whose id starts with `prefix`, by id, read a slice at a time."""
        ...

    def note(self, book: Book, project: str, key: str, text: str, *, urgent: bool = False) -> None:
        """Write an entry on this hour's page of a project's book (app/stores/pages.py), unless it holds one of this
        key. Raises Unavailable while there is no room, if it is not `urgent`."""
        ...

    def join(self, sampler_id: str) -> int:
        """The number of one more client of a sampling session, from 1 on. Raises NotFound for an unknown one."""
        ...

    def now(self) -> float:
        """Unix time in seconds by the server's clock, the only one that decides what has expired."""
        ...

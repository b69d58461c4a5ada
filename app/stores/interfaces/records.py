"""The promises about small records, their lifetimes, the payloads beside them, and allowances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from app.domain.limits import Charge, Payer, Used
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


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a model is in memory: the node that holds its lease, empty for none. `full`: see records.Model."""

    base_model: str
    node: str
    full: bool = False


class Lifecycle(Protocol):
    """When sessions, models and files come to their end. Every time is the state server's own.

    A session is heard of by a heartbeat, or by an Op of one of its models or samplers. It ends when it is finished or
    was not heard of for `engine.session_s`; an Op brings it back, and a heartbeat too unless it was finished.
    """

    def heartbeat(self, session_id: str) -> None:
        """Its client is still there."""
        ...

    def finish(self, session_id: str, reason: str) -> None:
        """Its client is done; the first reason stays as its status."""
        ...

    def move(self, session_id: str, project: str) -> None:
        """Its owner, and that of all that is in it or is being saved there, is another project from now on. One that is
        gone is left alone."""
        ...

    def expire(self) -> list[str]:
        """End the silent sessions; returns their ids."""
        ...

    def retired(self) -> list[str]:
        """Sessions that ended `engine.retain_s` ago or earlier."""
        ...

    def forget(self, session_id: str) -> bool:
        """Remove the record of a retired session; False (nothing changes) for one that is not retired any more."""
        ...

    def end_model(self, model_id: str, *, retired: bool = False) -> Holder | None:
        """End a model for good, in one step: whoever holds it is fenced, its journal and its snapshot pointer go, its
        waiting Ops fail ("user"), and later ones and owners get Gone. Again for an ended one changes nothing.

        None for an unknown model; with `retired`, also (and nothing changes) when its session is not retired any more.
        """
        ...

    def unload(self, model_id: str) -> None:
        """Its client needs it in memory no more, until the next Op. Nothing for an unknown model."""
        ...

    def end_sampler(self, sampler_id: str) -> bool:
        """Remove a sampler's record; False (and nothing changes) when its session is not retired any more."""
        ...

    def abort_samples(self) -> int:
        """Fail ("user") the unfinished requests of samplers that are gone, or whose session has ended; how many."""
        ...

    def holders(self, model_ids: Iterable[str]) -> list[Holder]:
        """Where these models are in memory now."""
        ...

    def unwanted(self, model_ids: Iterable[str]) -> set[str]:
        """Of these, those that were ended or are unknown; and of those with nothing to do the unloaded ones, and the
        ones whose session has ended."""
        ...

    def loads(self, model_id: str) -> list[int]:
        """The seqs in its journal that read a checkpoint when they run or are replayed."""
        ...

    def overdue(self, unreferenced: Iterable[str]) -> list[str]:
        """Note what nobody refers to now; returns what was in every such note for `engine.orphan_s`."""
        ...


class Payloads(Protocol):
    """The encoded content of journalled calls: in Redis, or moved ("spilled") to the object store, one object each."""

    def get(self, request_id: str) -> bytes:
        """Empty for an Op that has none or is gone. Raises Unavailable (store), NotFound when its object was lost."""
        ...

    def due(self, limit: int) -> list[str]:
        """Request ids whose payload should move now: large ones, and the oldest while over half the budget is used."""
        ...

    def spill(self, request_id: str) -> bool:
        """Move one; False when it was dropped meanwhile. Raises Unavailable, and it then stays where it is."""
        ...

    def remove_garbage(self) -> int:
        """Delete objects of dropped payloads, and of moves that never ended; how many. Raises Unavailable."""
        ...


class Allowances(Protocol):
    """What projects and keys may take, and have taken. What is journalled is charged as it is admitted (OpLog)."""

    def take(self, charge: Charge) -> None:
        """Charge all payers of a call, or none. Raises TooManyRequests where it may come again, and LimitReached where
        something has to go first."""
        ...

    def used(self, payer: Payer) -> Used:
        """What counts against his limits now."""
        ...

"""When sessions, models and files come to their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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

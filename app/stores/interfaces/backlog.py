"""What waits and runs, of everybody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A model whose calls wait: all behind `applied`, `waiting` of them. `node` holds it, empty for none.

    `running`: the next one runs there; `come`: it has been admitted.
    """

    model_id: str
    owner: str
    queue: str
    node: str
    applied: int
    waiting: int
    running: bool
    come: bool


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """A sampling request without a result, whether it runs or not."""

    request_id: str
    owner: str
    queue: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """`samples` by their admission, the first one first; `sequences` are those of a queue's requests that were given to
    a sampler."""

    models: Sequence[ModelLine]
    samples: Sequence[WaitingSample]
    sequences: Mapping[str, int]


class Backlog(Protocol):
    """What waits and runs, of everybody. Read while it moves on, so its parts may be some milliseconds apart."""

    def unfinished(self, most: int) -> Unfinished:
        """`most` models and samples, those first that waited longest without progress."""
        ...

    def seqs(self, model_ids: Iterable[str]) -> dict[str, list[int]]:
        """What waits of each model, in order; consumed seqs too."""
        ...

    def running(self, request_ids: Sequence[str]) -> set[str]:
        """The sampling requests among these that a sampler has begun."""
        ...

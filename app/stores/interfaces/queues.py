"""The promises about work that waits, runs or has ended, over all models and samplers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.domain.results import FutureState


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


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose future is still kept; unix times in seconds by the state server's clock, `ended` None while it has
    not."""

    request_id: str
    kind: str
    state: FutureState
    admitted: float
    ended: float | None


class Calls(Protocol):
    """What was called and when, as far as it is still known."""

    def of_model(self, model_id: str) -> list[Call]:
        """By seq, the newest 10,000."""
        ...

    def of_sampler(self, sampler_id: str) -> list[Call]:
        """Those that run, or whose results nobody has read, by id; the newest 10,000 of each client."""
        ...

    def of(self, request_ids: Iterable[str]) -> list[Call]:
        """Those of them that are known, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampling request that came to its end. `size`: bytes of its result."""

    request_id: str
    failed: bool
    size: int


class Completions(Protocol):
    """Which sampling requests came to their end, in that order, by poll target (app/ids.py)."""

    def since(self, target: str, cursor: int) -> tuple[list[Completion], int]:
        """Those behind `cursor` (0: all) whose results nobody read, oldest first, a slice at most; and the cursor to
        go on from. What is not behind `cursor` is forgotten."""
        ...

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Their results were fetched and may go soon; those of unfinished or unknown requests are left alone."""
        ...

"""What was called and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from app.domain.results import FutureState


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

"""Which sampling requests came to their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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

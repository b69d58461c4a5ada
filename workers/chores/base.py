"""What every chore is to the sweeper."""

from __future__ import annotations

from typing import Protocol


class Chore(Protocol):
    def sweep(self) -> None:
        """One round, every few seconds. It may raise: the next round tries again."""
        ...

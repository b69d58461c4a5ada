"""What projects and keys may take."""

from __future__ import annotations

from typing import Protocol

from app.domain.limits import Charge, Payer, Used


class Allowances(Protocol):
    """What projects and keys may take, and have taken. What is journalled is charged as it is admitted (OpLog)."""

    def take(self, charge: Charge) -> None:
        """Charge all payers of a call, or none. Raises TooManyRequests where it may come again, and LimitReached where
        something has to go first."""
        ...

    def used(self, payer: Payer) -> Used:
        """What counts against his limits now."""
        ...

"""What a trainer does at every tick, on its task thread: free what nobody uses, ring for what was put off."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from workers.owner import Owner
from workers.parked import Parked

_AT_ONCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Tidying:
    """`unwanted(model ids)` names those whose session is over, and those that were deleted; `incomplete()` those whose
    journal has to run again, since something was lost that it alone can make anew."""

    owner: Owner
    parked: Parked
    unwanted: Callable[[Collection[str]], set[str]]
    idle_s: float
    incomplete: Callable[[], Collection[str]] = tuple

    def __call__(self) -> None:
        self.parked.ring_due()
        for model_id in self.incomplete():
            self.owner.discard(model_id)
        self._let_go()

    def _let_go(self) -> None:
        """Saving states takes time in which nothing else runs here, so what takes long is left for the next tick."""
        residents = self.owner.residents()
        unwanted = self.unwanted(residents) if residents else set()
        started = time.monotonic()
        for model_id, resident in residents.items():
            if model_id in unwanted or started - resident.used > self.idle_s:
                self.owner.part_with(model_id)
                if time.monotonic() - started > _AT_ONCE_S:
                    return

"""What may run while a save of its model is being written: ahead of its commit, which waits behind the save's.

A save is in the way of the next step only for the time of a copy. Commits stay in order, so until the save is through a
result of what ran ahead is nobody's to read, and the journal alone says what the model is: whatever goes wrong, the
state that ran ahead is thrown away and the journal brings it back.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.ops import FORWARD, FORWARD_BACKWARD, OptimStep, SaveWeights
from app.stores.interfaces import Head
from workers.owner import Resident
from workers.parked import Parked
from workers.saves import Saves

# A load and another save wait, as does what the journal consumed.
_KINDS = (FORWARD, FORWARD_BACKWARD, OptimStep.kind)
# Their results are in memory until they are committed, and they have to run again should the save not come through.
_MOST = 16


@dataclass(frozen=True, slots=True)
class Ahead:
    saves: Saves
    parked: Parked

    def may_run(self, resident: Resident, head: Head) -> bool:
        """Whether the model's next Op may run now, as far as saves are concerned.

        Nothing runs ahead that broke a worker before; nor behind a failure, which dooms what waits only when it is
        committed; nor behind a save that was put off, which may be so again and again.
        """
        if head.kind == SaveWeights.kind and not self.saves.has_room(head.model_id):
            return False
        return not resident.uncommitted or (
            head.fresh
            and head.kind in _KINDS
            and len(resident.uncommitted) <= _MOST
            and not resident.uncommitted[-1].failure
            and not self.parked.is_put_off(head.model_id)
        )

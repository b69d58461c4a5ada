"""What has been added towards a model's next optim_step, and whether any of it is missing.

No optim_step may run on part of its gradients. The SDK sends optim_step without waiting for the forward_backward before
it, so a step behind a lost gradient is the usual case, not a rare one. The state follows from the journal alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.domain.ops import FORWARD_BACKWARD, CreateModel, DropGradients, LoadWeights, OptimStep
from app.stores.interfaces import Entry

LOST_BATCH = "lost_batch"


@dataclass(frozen=True, slots=True)
class Window:
    """`missing` says which call's gradient was lost; an optim_step then fails with it.

    A forward_backward that was refused at once may be sent again, and stands in for the lost one if nothing else had
    been added: else we cannot tell a batch sent again from a further part of it, and what was added might count twice.
    After one that failed when it ran nothing stands in, as its client may have sent the next part before it knew.
    """

    added: bool = False
    missing: str = ""
    beyond_repair: bool = False

    def after(self, entry: Entry, failure: str) -> Window:
        """The window once `entry` has run; `failure` is empty for success."""
        if entry.kind == FORWARD_BACKWARD:
            return Window(True, failure, beyond_repair=True) if failure else self._add()
        if entry.kind == LOST_BATCH:
            return self._lose(entry.doomed)
        if entry.kind == DropGradients.kind:
            return Window(missing=entry.doomed)
        if entry.kind == OptimStep.kind or (entry.kind in (CreateModel.kind, LoadWeights.kind) and not failure):
            return Window()
        return self

    def _add(self) -> Window:
        return replace(self, added=True) if self.beyond_repair else Window(added=True)

    def _lose(self, reason: str) -> Window:
        return replace(self, missing=reason, beyond_repair=self.beyond_repair or self.added)

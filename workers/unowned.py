"""What waits in models that no trainer owns: their doorbells may be behind many others in the queue that all read."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app.stores.interfaces import Head, OpLog


@dataclass
class Unowned:
    """Of a queue's models. A look takes 0.2 ms, or 2 where a thousand things wait; at most `share` of the time goes
    into that."""

    oplog: OpLog
    queue: str
    share: float = 0.01
    _next: float = 0.0

    def heads(self) -> list[Head]:
        """Their next Ops, longest without progress first; nothing when it was looked lately."""
        began = time.monotonic()
        if began < self._next:
            return []
        found = self.oplog.unowned(self.queue)
        ended = time.monotonic()
        self._next = ended + (ended - began) / self.share
        return found

"""Moves payloads from Redis to the object store, so that what waits never fills the memory of the state server."""

from __future__ import annotations

import logging

from app.stores.interfaces import Payloads

log = logging.getLogger(__name__)
# One batch a round: between two of them the lead may pass to another worker.
_BATCH = 64


class Spilling:
    """While the object store is away nothing moves, and nothing is lost."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads

    def sweep(self) -> None:
        """Raises Unavailable."""
        self._payloads.remove_garbage()
        moved = sum(self._payloads.spill(request_id) for request_id in self._payloads.due(_BATCH))
        if moved:
            log.info("moved %d payloads to the object store", moved)

"""Deletes captured answers that have expired."""

from __future__ import annotations

import logging
import time

from app.stores.objects.captures import CaptureFiles

log = logging.getLogger(__name__)
_PERIOD_S = 3600.0


class ExpiredCaptures:
    """The maintenance task. It may run twice at once."""

    def __init__(self, files: CaptureFiles) -> None:
        self._files = files
        self._next = 0.0

    def sweep(self) -> None:
        """Runs one round, if it is due. Raises Unavailable while the object store is away."""
        if time.monotonic() < self._next:
            return
        if count := self._files.remove_expired():
            log.info("deleted %d captured answers that had expired", count)
        self._next = time.monotonic() + _PERIOD_S

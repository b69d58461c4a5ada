"""Deletes captured answers that are older than their project's `capture_days`, and all of a project without it."""

from __future__ import annotations

import logging
import time

from app.services.admission import LimitsOf
from app.stores.objects.captures import CaptureFiles, Place

log = logging.getLogger(__name__)
_PERIOD_S = 3600.0


class OldCaptures:
    """The maintenance task. It may run twice at once."""

    def __init__(self, files: CaptureFiles, limits: LimitsOf) -> None:
        self._files, self._limits = files, limits
        self._next = 0.0

    def sweep(self) -> None:
        """Runs one round, if it is due. Raises Unavailable while the object store is away."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PERIOD_S
        old = [place for place in self._files.places() if self._is_old(place)]
        if old:
            self._files.remove(old)
            log.info("deleted %d captured answers that were too old", len(old))

    def _is_old(self, place: Place) -> bool:
        days = self._limits.project(place.project).capture_days
        return days is None or place.day < self._files.today() - days

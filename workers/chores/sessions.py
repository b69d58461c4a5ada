"""Ends the sessions nobody heard of for long, what they sample, and what is left of those that ended long ago."""

from __future__ import annotations

import logging

from app.services.endings import Endings
from app.stores.interfaces import Lifecycle

log = logging.getLogger(__name__)


class Sessions:
    """What a silent session holds in memory is freed by its owners, who ask for it (Lifecycle.unwanted)."""

    def __init__(self, lifecycle: Lifecycle, endings: Endings) -> None:
        self._lifecycle, self._endings = lifecycle, endings

    def sweep(self) -> None:
        expired = self._lifecycle.expire()
        if expired:
            log.info("%d sessions expired", len(expired))
        for session_id in self._lifecycle.retired():
            self._endings.retire(session_id)
        aborted = self._lifecycle.abort_samples()
        if aborted:
            log.info("%d samples of ended sessions were cancelled", aborted)

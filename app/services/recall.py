"""A state server that was emptied knows no accounts: they are brought back before anybody's key is turned away."""

from __future__ import annotations

import logging
import threading
import time

from app.errors import Unavailable
from app.services.accounts import AccountService
from app.stores.interfaces import Records

log = logging.getLogger(__name__)
_NAMESPACE, _KEY = "recalled", "accounts"
_RETRY_S = 5.0


class Recall:
    """All accounts at once, and once: that they are there is noted beside them, and goes with them. So keys that never
    were cost the object store nothing, however many are tried."""

    def __init__(self, accounts: AccountService, store: Records) -> None:
        self._accounts, self._records = accounts, store
        self._lock = threading.Lock()
        self._failed = float("-inf")

    def __call__(self) -> bool:
        """Bring them back; False when they are there. Raises Unavailable while that cannot be done, or is underway."""
        if self._is_done():
            return False
        if not self._lock.acquire(blocking=False):
            raise Unavailable("the accounts are being read from the object store; try again soon")
        try:
            if not self._is_done():
                self._recall()
        finally:
            self._lock.release()
        return True

    def _is_done(self) -> bool:
        noted = self._records.get(_NAMESPACE, _KEY)
        return noted is not None and noted["done"] == "true"

    def _recall(self) -> None:
        if time.monotonic() - self._failed < _RETRY_S:
            raise Unavailable("the object store, which has the accounts, is away; try again soon")
        self._records.put(_NAMESPACE, _KEY, {"done": "false"})
        try:
            found, damaged = self._accounts.rebuild()
        except Unavailable:
            self._failed = time.monotonic()
            raise
        # No update of what is gone: the server may have been emptied meanwhile.
        self._records.update(_NAMESPACE, _KEY, {"done": "true"})
        log.info("accounts were brought back from the object store: %d", found)
        if damaged:
            log.warning("damaged accounts, to be restored in the object store: %s", ", ".join(damaged))

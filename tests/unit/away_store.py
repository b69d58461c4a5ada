"""A folder store that can be away, or run code in the middle of a write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from app.errors import Unavailable
from app.stores.objects.folder import FolderStore


class AwayStore(FolderStore):
    away = False
    before_put: Callable[[], object] = staticmethod(lambda: None)

    def put_new(self, key: str, source: Path | bytes) -> bool:
        self._check()
        self.before_put()
        return super().put_new(key, source)

    def read(self, key: str) -> bytes:
        self._check()
        return super().read(key)

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the store is away")

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis

from app.errors import Unavailable
from app.services.tenants.accounts import AccountService
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.folder import FolderStore
from app.stores.redis.records import RedisRecords


class Store(FolderStore):
    """A store that counts its reads. `away`: it cannot be read or written. `gate`: lists wait there."""

    reads = 0
    away = False
    gate: threading.Event | None = None

    def put_new(self, key: str, source: Path | bytes) -> bool:
        self._need()
        return super().put_new(key, source)

    def list(self, prefix: str) -> list[str]:
        self.reads += 1
        if self.gate is not None:
            assert self.gate.wait(120)
        self._need()
        return super().list(prefix)

    def read(self, key: str) -> bytes:
        self.reads += 1
        return super().read(key)

    def _need(self) -> None:
        if self.away:
            raise Unavailable("the store is away")


@pytest.fixture
def objects(tmp_path: Path) -> Store:
    return Store(tmp_path, "", "")


@pytest.fixture
def accounts(objects: Store, client: redis.Redis) -> AccountService:
    return AccountService(AccountFiles(objects), RedisRecords(client))

"""Files of an adapter that only a trainer can bring are requested from one, and seldom."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from app.domain.ops import LoraSpec
from app.domain.records import ShmTransfer
from app.errors import ServerOpError, Unavailable
from app.stores.disk import Disk
from app.stores.objects.folder import FolderStore
from app.stores.redis.records import RedisRecords, dump
from tests.unit.workers.sample.test_adapters import ABOUT
from workers.checkpoints import transfer
from workers.checkpoints.shm_transfer import ShmFolder
from workers.sample import adapter_files
from workers.sample.adapter_files import AdapterFiles


@dataclass
class World:
    """A sampler's adapter files. The machine of the adapters on record is lost, and no trainer answers."""

    client: redis.Redis
    folder: Path
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records, self.store = RedisRecords(self.client), FolderStore(self.folder / "objects", "secret", "http://x")
        transfers = ShmFolder(self.folder / "handover", 2**30)
        cache = Disk("the cache", self.folder / "cache", 0)
        self.files = AdapterFiles(self.store, self.records, transfers, cache, 0, self.asked.append)

    def lose(self, prefix: str) -> None:
        """The files are on record, and nowhere."""
        self.store.delete(self.store.list(f"{prefix}/"))
        self.records.put(ShmTransfer.namespace, prefix, dump(ShmTransfer("s:train:0", 4)))

    def bring(self, prefix: str) -> None:
        folder = self.folder / "made"
        folder.mkdir()
        (folder / "adapter.safetensors").write_bytes(b"x")
        transfer.upload(
            self.store, prefix, folder, transfer.describe(folder, **ABOUT, lora=LoraSpec(4), seq=1, epoch=1)
        )

    def use(self, prefix: str) -> None:
        with self.files.use(prefix):
            pass

    def miss(self, prefix: str, times: int = 1) -> None:
        for _ in range(times):
            with pytest.raises(Unavailable):
                self.use(prefix)


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(adapter_files, "_PATIENCE_S", 0.0)
    return World(client, tmp_path)


def test_however_many_requests_want_missing_files_their_owner_is_requested_every_half_minute(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Each request sends a message, and without a trainer the messages would fill the broker."""
    clock, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed)
    for prefix in "ab":
        world.lose(prefix)
        world.miss(prefix, times=50)
    assert world.asked == ["a", "b"]
    passed += 31
    world.miss("a", times=50)
    assert world.asked == ["a", "b", "a"]


def test_files_that_came_and_are_lost_again_are_requested_at_once(world: World):
    world.lose("a")
    world.miss("a")
    world.bring("a")
    world.use("a")
    world.lose("a")
    world.miss("a")
    assert world.asked == ["a", "a"]


def test_nothing_is_remembered_of_missing_files_once_they_are_gone(world: World):
    world.lose("a")
    world.miss("a")
    world.records.delete(ShmTransfer.namespace, "a")
    with pytest.raises(ServerOpError, match="gone"):
        world.use("a")
    world.lose("a")
    world.miss("a")
    assert world.asked == ["a", "a"]

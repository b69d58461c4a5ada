"""A jump of the clock deletes and closes nothing before the clock has been steady for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from app.domain.records import Checkpoint
from app.settings import EngineSettings, Settings
from app.stores.objects.captures import Place
from app.stores.objects.folder import FolderStore
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from tests import assembly
from tests.pages import age, in_mid_hour, listed
from tests.unit.workers.maintenance.test_sessions import HOUR_MS, take_calls
from workers.process.parts import create_maintenance

MODEL = "session:train:0"
PATH = f"tinker://{MODEL}/weights/a"
ENGINE = EngineSettings()


class World:
    """A checkpoint and a captured answer that have expired, and a page of a past hour, by the state server's clock."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        self._client, self._records = client, RedisRecords(client)
        self._store = FolderStore(folder, "secret", "http://x")
        oplog = RedisOpLog(client, ENGINE, self._store)
        parts = assembly.parts(client, Settings(engine=ENGINE), "node/boot", oplog, self._store)
        parts.keeper.stop()
        self._maintenance = create_maintenance(parts)
        now = self._records.now()
        prefix = f"models/{MODEL}/weights/a/4-1"
        saved = Checkpoint("me", MODEL, "weights", "base", prefix, 0.0, 1, {}, ["a"], expires_at=now - 1)
        self._records.put(Checkpoint.namespace, PATH, dump(saved))
        self._store.put_new(Place.new("me", "run", now - 2 * 86_400, 1).key, b"x")
        in_mid_hour()
        self._records.note("audit", "me", "one", "x")
        age(client)

    def sweep(self) -> None:
        for role in ("orphans", "captures", "accounting"):
            self._maintenance._round(role)

    def left(self) -> tuple[bool, int, int]:
        """True while the checkpoint is there, and the numbers of captures and of open pages."""
        is_saved = self._records.get(Checkpoint.namespace, PATH) is not None
        return is_saved, len(self._store.list("captures/")), len(listed(self._client))


@pytest.fixture
def world(client: redis.Redis, tmp_path: Path) -> World:
    return World(client, tmp_path)


@pytest.mark.parametrize("seen_ms_ago", [HOUR_MS, -HOUR_MS], ids=["set forward", "set back"])
def test_a_clock_that_jumps_deletes_and_closes_nothing_before_it_was_steady(
    world: World, client: redis.Redis, seen_ms_ago: int
):
    take_calls(client, 3 * HOUR_MS, seen_ms_ago)
    for _ in range(2):
        world.sweep()
    assert world.left() == (True, 1, 1)
    take_calls(client, int(ENGINE.session_s * 1000))
    world.sweep()
    assert world.left() == (False, 0, 0)

"""A worker does not start on a state server that may lose calls, or on another object store than that of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from app.dispatch import celery_app
from app.errors import SetupError
from app.settings import RedisSettings, Settings
from tests.servers import start_valkey
from workers.process.parts import Parts


def test_a_worker_does_not_start_on_a_state_server_that_may_lose_calls(tmp_path: Path):
    with start_valkey(tmp_path / "valkey", options=("--appendfsync", "everysec")) as url:
        settings = Settings(data_dir=tmp_path, redis=RedisSettings(url=url))
        with pytest.raises(SetupError, match="set appendfsync always"):
            Parts.of(settings, celery_app(settings), "trainer/boot")


def test_a_worker_does_not_start_on_another_object_store(client: redis.Redis, valkey: str, tmp_path: Path):
    settings = Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey))
    Parts.of(settings, celery_app(settings), "trainer/boot").keeper.stop()
    (tmp_path / "objects").rename(tmp_path / "unmounted")
    with pytest.raises(SetupError, match="mount its disk"):
        Parts.of(settings, celery_app(settings), "trainer/boot")

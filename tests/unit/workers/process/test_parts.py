"""A worker does not start on a state server that may lose calls."""

from __future__ import annotations

from pathlib import Path

import pytest

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

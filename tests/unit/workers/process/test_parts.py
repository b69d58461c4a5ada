"""A worker does not start on a state server that may lose calls, on another object store than that of the others, or
with a setting that does not go with its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from app.dispatch import celery_app
from app.errors import SetupError, UnservableModel
from app.settings import BaseModelSettings, RedisSettings, SamplerSettings, Settings, TrainerSettings
from tests.models import tiny_qwen3
from tests.servers import start_valkey
from workers.process import assembly
from workers.process.parts import Parts


def test_a_worker_does_not_start_on_a_state_server_that_may_lose_calls(tmp_path: Path):
    with start_valkey(tmp_path / "valkey", options=("--appendfsync", "everysec")) as url:
        settings = Settings(data_dir=tmp_path, redis=RedisSettings(url=url))
        with pytest.raises(SetupError, match="set appendfsync always"):
            Parts.of(settings, celery_app(settings), "trainer/boot")


@pytest.mark.parametrize("start", [assembly._start_trainer, assembly._start_sampler])
@pytest.mark.parametrize("full", [False, True])
def test_a_worker_of_a_model_without_experts_does_not_start_with_router_replay(
    start: Callable[..., object], full: bool, tmp_path: Path
):
    base = BaseModelSettings(
        name="dense",
        path=str(tiny_qwen3(tmp_path)),
        router_replay=True,
        full=TrainerSettings(),
        full_sampler=SamplerSettings(),
    )
    with pytest.raises(UnservableModel, match="has no experts"):
        start(cast(Any, None), base, "queue", full=full)


def test_a_worker_does_not_start_on_another_object_store(client: redis.Redis, valkey: str, tmp_path: Path):
    settings = Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey))
    Parts.of(settings, celery_app(settings), "trainer/boot").keeper.stop()
    (tmp_path / "objects").rename(tmp_path / "unmounted")
    with pytest.raises(SetupError, match="mount its disk"):
        Parts.of(settings, celery_app(settings), "trainer/boot")

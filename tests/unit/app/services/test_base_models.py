"""Facts of the base models that are served."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from app.services.base_models import BaseModels
from app.settings import BaseModelSettings, Settings
from app.stores.redis.records import RedisRecords


def test_a_tokenizers_folder_is_named_by_its_absolute_path_for_as_long_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: redis.Redis
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(base_models=(BaseModelSettings(name="org/tiny", path="weights"),))
    bases = BaseModels(settings, RedisRecords(client))
    assert bases.client_tokenizer("org/tiny") == "weights", "a repository of the Hub"
    (tmp_path / "weights").mkdir()
    assert bases.client_tokenizer("org/tiny") == str(tmp_path / "weights")
    (tmp_path / "weights").rmdir()
    assert bases.client_tokenizer("org/tiny") == "weights"


def test_the_name_of_a_base_model_that_is_served_no_more_is_its_tokenizer(client: redis.Redis) -> None:
    assert BaseModels(Settings(), RedisRecords(client)).tokenizer("org/gone") == "org/gone"

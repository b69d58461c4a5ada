"""The files of an image processor, where they are not on this disk."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from transformers import Qwen2VLImageProcessorPil

from app.errors import Unavailable
from app.services.base_models import BaseModels
from app.services.openai.images import ImageTokensOf, read
from app.stores.hub_cache import HubCache
from tests import pictures
from tests.hub_of_models import hub_of_models, use_hub


class Bases:
    def tokenizer(self, name: str) -> str:
        return name


def test_a_hub_that_is_silent_is_asked_once_for_an_image_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.stores.hub_cache._ANSWER_S", 1)
    with hub_of_models() as hub:
        hub.awake.clear()
        use_hub(monkeypatch, hub.url, tmp_path)
        tokens_of = ImageTokensOf(cast(BaseModels, Bases()), HubCache())
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"org/model from 127\.0\.0\.1 cannot be fetched"):
                tokens_of("org/model")
        assert hub.asked == ["org/model"]


def test_an_image_processor_has_the_values_that_its_file_leaves_out(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"image_token_id": 7}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    tokens = read(tmp_path)
    for width, height in ((1, 1), (57, 56), (280, 420), (4000, 3000)):
        patches = Qwen2VLImageProcessorPil().get_number_of_image_patches(height, width, {})
        assert tokens.count(width, height) == patches // 4


def test_an_image_processor_is_fetched_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache, folder = HubCache(), tmp_path / "model"
    pictures.processor().save_pretrained(folder)
    (folder / "config.json").write_text('{"image_token_id": 7}')
    with hub_of_models() as hub:
        hub.repos["org/model"] = folder
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        cache.folder("org/model")
    assert ImageTokensOf(cast(BaseModels, Bases()), cache)("org/model").placeholder == 7

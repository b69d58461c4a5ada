"""A model's skeleton has the module paths of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import UnservableModel
from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.backends.training.architectures import logit_rule
from workers.models import base_model, lora


@pytest.mark.parametrize("case", ["qwen3", "gemma3, vision", "qwen3.5, vision"])
def test_the_skeleton_takes_adapters_where_the_model_does(case: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="q", path=str(architectures.build(case, tmp_path)), dtype="float32")
    assert lora.targets(base_model.skeleton(settings)) == lora.targets(base_model.load(settings).model)


@pytest.mark.parametrize(("case", "value"), [("gemma3", True), ("gemma2", True), ("gemma4", "all")])
def test_a_model_that_attends_to_later_tokens_is_refused(case: str, value: object, tmp_path: Path) -> None:
    architectures.save(architectures.config_of(case, use_bidirectional_attention=value), tmp_path)
    settings = BaseModelSettings(name="q", path=str(tmp_path), dtype="float32")
    for open_model in (base_model.skeleton, base_model.load):
        with pytest.raises(UnservableModel, match=r"'q' attends to later tokens, so it has no next-token logprobs"):
            open_model(settings)


def test_a_model_that_attends_to_later_tokens_of_images_alone_is_served(tmp_path: Path) -> None:
    architectures.save(architectures.config_of("gemma4", use_bidirectional_attention="vision"), tmp_path)
    settings = BaseModelSettings(name="q", path=str(tmp_path), dtype="float32")
    base_model.skeleton(settings)
    assert logit_rule(base_model.load(settings).model) is not None

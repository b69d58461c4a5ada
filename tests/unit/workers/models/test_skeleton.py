"""A model's skeleton has the module paths of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.models import base_model, lora


@pytest.mark.parametrize("case", ["qwen3", "gemma3, vision", "qwen3.5, vision"])
def test_the_skeleton_takes_adapters_where_the_model_does(case: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="q", path=str(architectures.build(case, tmp_path)), dtype="float32")
    assert lora.targets(base_model.skeleton(settings)) == lora.targets(base_model.load(settings).model)

"""The groups of weights whose adapters a vLLM sampler takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoModelForCausalLM

from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.models import base_model


@pytest.mark.parametrize(("case", "taken"), [("qwen3", ("attn", "mlp", "unembed")), ("qwen3-moe", ("attn", "unembed"))])
def test_vllm_takes_no_adapters_on_experts(case: str, taken: tuple[str, ...], tmp_path: Path) -> None:
    folder = architectures.build(case, tmp_path)
    settings = BaseModelSettings(name="tiny", path=str(folder), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    info = base_model.describe(settings, model, model.dtype)
    sampler = VllmSampler(settings)
    sampler._engine = cast(Any, SimpleNamespace(call=lambda run: [True]))  # vLLM takes adapters on the head
    assert sampler._adaptable(info, model).trainable_groups == taken

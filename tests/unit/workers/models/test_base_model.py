from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.errors import SetupError
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
from workers.models import base_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


def settings(path: Path | str, **given: Any) -> BaseModelSettings:
    return BaseModelSettings(name="tiny", path=str(path), **given)


def test_a_loaded_base_is_frozen_and_knows_itself(folder: Path) -> None:
    base = base_model.load(settings(folder, dtype="float32", max_context=128), torch.device("cpu"))
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert base.tokenizer == str(folder)
    assert (base.info.max_context, base.info.vocab_size, base.info.dtype) == (128, 320, "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_asked_for_is_the_dtype_loaded(folder: Path, dtype: torch.dtype) -> None:
    base = base_model.load(settings(folder, dtype=str(dtype).removeprefix("torch.")), torch.device("cpu"))
    assert base.dtype is dtype
    assert {parameter.dtype for parameter in base.model.parameters()} == {dtype}


@pytest.mark.parametrize(("instruction", "dtype"), [("amx_bf16", torch.bfloat16), ("none", torch.float32)])
def test_auto_is_bfloat16_only_on_a_cpu_that_is_fast_at_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, instruction: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instruction: True})
    assert base_model.load(settings(folder), torch.device("cpu")).dtype is dtype


def test_convolutions_in_fp32_are_computed_in_fp32(folder: Path) -> None:
    """On a GPU too, as `tests/parity/test_images.py` shows there."""
    torch.backends.cudnn.allow_tf32 = True
    base_model.load(settings(folder, dtype="float32"), torch.device("cpu"))
    assert not torch.backends.cudnn.allow_tf32


def test_a_cap_on_attention_scores_is_kept(tmp_path: Path) -> None:
    folder = architectures.build("gemma2", tmp_path)
    base = base_model.load(settings(folder, dtype="float32"), torch.device("cpu"))
    tokens = torch.arange(40)[None]
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(base.model(tokens).logits, wanted(tokens).logits)


def test_a_context_over_the_models_own_is_a_setup_error(folder: Path) -> None:
    with pytest.raises(SetupError, match="512"):
        base_model.load(settings(folder, max_context=513))

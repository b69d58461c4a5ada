"""vLLM's CPU build on the architectures: its logprobs against those of the trainer.

`make families` runs all cases of `architectures.VLLM` and `VLLM_FULL`, and `make test` those of
`architectures.VLLM_ALWAYS` and one with experts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import UserOpError
from app.settings import BaseModelSettings
from tests.conformance.samplers import BACKENDS
from tests.models import VOCAB_SIZE, byte_tokenizer
from tests.parity import architectures
from tests.parity.test_sampled_architectures import SPEC, check, compare, sampled, trained
from workers.backends.sampling.backends import create
from workers.backends.sampling.vllm import checks
from workers.backends.training.base import Create
from workers.models import target_modules

ALL = bool(os.environ.get("TINSMITH_FAMILIES_ALL"))


@pytest.fixture(autouse=True)
def heads_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's layers have heads of two sizes; vLLM's CPU attention refuses 16."""
    monkeypatch.setitem(architectures.CASES["gemma4"][1], "global_head_dim", 32)


def settings(base: Path) -> BaseModelSettings:
    return BaseModelSettings(
        name="tiny", path=str(base), dtype="float32", max_context=256, max_rank=8, sampler=BACKENDS["vllm"]
    )


@pytest.fixture(autouse=True)
def values_that_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's layer of full attention has no v_proj."""
    monkeypatch.setitem(architectures.CASES["gemma4"][1], "attention_k_eq_v", True)


@pytest.fixture(autouse=True)
def a_vocabulary_that_vllm_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo 3's vocabulary is no multiple of 64 (100,278), so vLLM's logits are wider than an adapter on its head.

    Llama has such a vocabulary here too: `make test` does not run OLMo 3.
    """
    for case in ("olmo3", "llama"):
        monkeypatch.setitem(architectures.CASES[case][1], "vocab_size", VOCAB_SIZE + 3)


@pytest.fixture(autouse=True)
def a_head_that_is_too_large_for_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's vocabulary is beyond the largest head that vLLM takes adapters on."""
    monkeypatch.setitem(architectures.CASES["gemma3"][1], "vocab_size", 262_144)


@pytest.mark.parametrize("case", architectures.VLLM if ALL else architectures.VLLM_ALWAYS)
def test_vllm_has_the_trainers_logprobs_with_and_without_an_adapter(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base", head_dim=32)
    byte_tokenizer().save_pretrained(base)
    sampler = create(settings(base))
    # Where the head is the embedding itself (Gemma, Gemma 2, Cohere) or too large, vLLM takes no adapter on it.
    spec = replace(SPEC, train_unembed="unembed" in sampler.open().trainable_groups)
    assert not (case == "gemma3" and spec.train_unembed)
    trainer = trained(base, tmp_path / "adapter", spec)
    trainer.apply({"base": Create(spec)})  # a new adapter adds nothing
    sampler.load("m", tmp_path / "adapter")
    found = {"m": sampled(sampler, "m"), "base": sampled(sampler, None)}
    sampler.close()
    for model, sequences in found.items():
        compare(sequences, trainer, model, atol=1e-3)


def test_vllm_serves_adapters_on_the_linears_that_its_arguments_name_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name the linears of a model with experts. The CPU build does not run experts beside adapters, so a model
    without experts has these arguments here. vLLM itself drops an adapter's weights on others in silence."""
    base = architectures.build("llama", tmp_path / "base", head_dim=32)
    byte_tokenizer().save_pretrained(base)
    sampler = create(settings(base))
    with monkeypatch.context() as patch:
        patch.setattr(checks, "check_experts", lambda *_: None)
        patch.setattr(target_modules, "has_experts", lambda _: True)
        assert sampler.open().trainable_groups == ("attn", "unembed")
    trainer = trained(base, tmp_path / "adapter", replace(SPEC, train_mlp=False))
    trained(base, tmp_path / "whole")
    with pytest.raises(UserOpError, match=r"model\.layers\.0\.mlp\.(gate|up|down)_proj, .*sampler\.backend"):
        sampler.load("whole", tmp_path / "whole")
    sampler.load("m", tmp_path / "adapter")
    check(sampler, trainer, atol=1e-3)


@pytest.mark.parametrize("case", architectures.VLLM_FULL if ALL else architectures.VLLM_FULL[:1])
def test_vllm_has_the_trainers_logprobs_of_a_model_with_experts_without_adapters(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base", head_dim=32)
    byte_tokenizer().save_pretrained(base)
    trainer = trained(base, tmp_path / "adapter")
    trainer.apply({"base": Create(SPEC)})  # a new adapter adds nothing
    sampler = create(settings(base), full=True)
    sampler.open()
    found = sampled(sampler, None)
    sampler.close()
    compare(found, trainer, "base", atol=1e-3)

"""The arguments that vLLM starts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.sampling import MAX_TOP
from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
from workers.backends.sampling.vllm import arguments, patches
from workers.backends.sampling.vllm.arguments import adapted, adapter_capacity, engine_args, lora_rank
from workers.models import base_model, lora

MIB = 2**20


def skeleton_of(folder: Path) -> Any:
    return base_model.skeleton(BaseModelSettings(name="n", path=str(folder)))


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return skeleton_of(tiny_qwen3(tmp_path_factory.mktemp("tiny")))


def test_the_rank_is_rounded_up_to_one_vllm_takes() -> None:
    assert [lora_rank(rank) for rank in (1, 8, 9, 64, 65, 257, 512)] == [8, 8, 16, 64, 128, 320, 512]
    with pytest.raises(SetupError, match="max_rank is 513"):
        lora_rank(513)


def test_the_operators_engine_arguments_win(skeleton: Any) -> None:
    sampler = SamplerSettings(max_loras=3, max_batch=5, memory_share=0.5, engine_args={"max_num_seqs": 9, "seed": 1})
    args = engine_args(BaseModelSettings(name="n", path="~/m", max_rank=20, sampler=sampler), skeleton, 100, "float32")
    assert args["model"] == str(Path.home() / "m")
    assert (args["max_num_seqs"], args["seed"], args["max_model_len"], args["max_lora_rank"]) == (9, 1, 100, 32)
    # On a CPU the base model takes a fourth slot, and half of 4 GiB is 2.
    assert (args["max_loras"], args["kv_cache_memory_bytes"]) == (4, 2 * 2**30)
    # All adapters that the sampler keeps loaded stay in vLLM's memory.
    assert args["max_cpu_loras"] == sampler.loaded_loras + 1 == 13
    assert "lora_target_modules" not in args and "language_model_only" not in args


def test_vllm_keeps_no_fewer_adapters_than_the_operator_lets_run_together(skeleton: Any) -> None:
    sampler = SamplerSettings(max_loras=2, engine_args={"max_loras": 40})
    args = engine_args(BaseModelSettings(name="n", path="~/m", sampler=sampler), skeleton, 100, "float32")
    assert args["max_loras"] == args["max_cpu_loras"] == 40


@pytest.mark.parametrize(("gpu", "most", "given"), [(False, 0, 72), (True, 0, None), (True, 8, 9)])
def test_vllm_chooses_the_sequences_on_a_gpu_unless_the_settings_do(
    gpu: bool, most: int, given: int | None, skeleton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = BaseModelSettings(name="n", path="~/m", sampler=SamplerSettings(max_batch=most))
    assert engine_args(settings, skeleton, 100, "bfloat16").get("max_num_seqs") == given


@pytest.mark.parametrize(("gpu", "sleep", "enabled"), [(True, True, True), (True, False, None), (False, True, None)])
def test_vllm_can_free_its_memory_only_on_a_gpu_and_only_if_the_settings_say_so(
    gpu: bool, sleep: bool, enabled: bool | None, skeleton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = BaseModelSettings(name="n", path="~/m", sampler=SamplerSettings(backend="vllm", sleep=sleep))
    assert engine_args(settings, skeleton, 100, "bfloat16").get("enable_sleep_mode") == enabled


def test_likeliest_tokens_beyond_vllms_own_20_are_given(skeleton: Any) -> None:
    args = engine_args(BaseModelSettings(name="n", path="~/m"), skeleton, 100, "float32")
    assert args["max_logprobs"] == MAX_TOP >= 100


@pytest.mark.parametrize(
    ("memory_mib", "ranks", "count", "kept"),
    [
        (10_000, 1, 1, 12),
        (320, 1, 1, 10),
        (320, 2, 1, 5),
        (320, 1, 2, 5),
        (320, 1, 0, 10),
        (320, 4, 1, 3),
        (1, 1, 1, 3),
    ],
)
def test_no_more_adapters_stay_loaded_than_fit_in_a_quarter_of_the_host_memory(
    memory_mib: int, ranks: int, count: int, kept: int, skeleton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of vLLM's worker processes, of all samplers, holds the whole adapter."""
    values = sum(inputs + outputs for pairs in lora.shapes(skeleton).values() for inputs, outputs, _ in pairs.values())
    rank = 8 * MIB // (2 * values)  # an adapter in bf16 has at most 8 MiB
    monkeypatch.setattr(arguments, "usable_bytes", lambda: memory_mib * MIB)
    sampler = SamplerSettings(max_loras=3, tensor_parallel=ranks, count=count)
    settings = BaseModelSettings(name="n", path="~/m", sampler=sampler, max_rank=rank)
    assert adapter_capacity(settings, skeleton, "bfloat16") == kept
    monkeypatch.setattr(arguments, "lora_rank", int)  # the rank is beyond vLLM's own
    assert engine_args(settings, skeleton, 100, "bfloat16")["max_cpu_loras"] == kept + 1, "and the base on a CPU"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("qwen3-moe", "k_proj lm_head o_proj q_proj v_proj"),
        (
            "qwen3.5-moe, vision",
            "in_proj_a in_proj_b in_proj_qkv in_proj_z k_proj lm_head o_proj out_proj q_proj v_proj",
        ),
    ],
)
def test_vllm_reserves_memory_for_adapters_on_no_expert(case: str, named: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)))
    args = engine_args(settings, base_model.skeleton(settings), 100, "bfloat16")
    assert args["lora_target_modules"] == named.split()


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_head_beyond_vllms_largest_takes_no_adapter(
    beyond: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = skeleton_of(architectures.build("qwen3-moe", tmp_path))
    monkeypatch.setattr(arguments, "MOST_HEAD_TOKENS", skeleton.config.vocab_size - beyond)
    args = engine_args(BaseModelSettings(name="n", path="~/m"), skeleton, 100, "bfloat16")
    assert ("lm_head" in args["lora_target_modules"], bool(adapted(skeleton)["unembed"])) == (not beyond, not beyond)
    assert patches.MOST_HEAD_TOKENS == 258_048


@pytest.mark.parametrize(
    ("case", "given"),
    [("qwen3-vl", True), ("qwen3.5, vision", True), ("gemma3, vision", True), ("mistral3", True), ("gemma3", None)],
)
@pytest.mark.parametrize("full", [False, True])
def test_vllm_loads_no_vision_tower(case: str, given: bool | None, full: bool, tmp_path: Path) -> None:
    skeleton = skeleton_of(architectures.build(case, tmp_path))
    args = engine_args(BaseModelSettings(name="n", path="~/m"), skeleton, 100, "bfloat16", full=full)
    assert args.get("language_model_only") == given

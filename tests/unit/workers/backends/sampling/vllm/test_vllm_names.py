"""The names of vLLM that Tinsmith calls, replaces or reads are there, with the parameters that it counts on. An upgrade
of vLLM that changes one fails here, and not in a worker."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.platforms import current_platform

from app.settings import BaseModelSettings
from app.settings.workers import SPECULATION
from tests.parity import architectures
from workers.backends.sampling.vllm.arguments import engine_args
from workers.backends.sampling.vllm.engine import set_environment
from workers.models import base_model

_ADD_LORA = ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale")
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner CPUModelRunner"
_SCORES = "vllm.v1.worker.gpu.sample.prompt_logprob PromptLogprobsWorker"
_GRAMMARS = "vllm.v1.worker.gpu.structured_outputs StructuredOutputsWorker"
_ENGINE = "vllm.v1.engine.async_llm AsyncLLM"

REPLACED = {
    f"{_CPU_RUNNER}.sample_tokens": ("self", "grammar_output"),
    f"{_CPU_RUNNER}._update_states": ("self", "scheduler_output"),
    f"{_RUNNER} GPUModelRunner.sample_tokens": ("self", "grammar_output"),
    f"{_RUNNER} GPUModelRunner._get_prompt_logprobs_dict": ("self", "hidden_states", "num_scheduled_tokens"),
    f"{_RUNNER} apply_grammar_bitmask": ("scheduler_output", "grammar_output", "input_batch", "logits"),
    "vllm.v1.sample.sampler Sampler.compute_logprobs": ("logits",),
    f"{_GRAMMARS}.apply_grammar_bitmask": ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
    f"{_SCORES}.add_request": ("self", "req_id", "req_idx", "sampling_params"),
    f"{_SCORES}.compute_prompt_token_id_logprobs": (
        *("self", "logits_fn", "hidden_states", "input_batch", "prompt_lens"),
    ),
    "vllm.logprobs FlatLogprobs.extend": ("self", "logprobs_multi_positions"),
    "vllm.v1.engine.detokenizer FastIncrementalDetokenizer.__init__": ("self", "tokenizer", "request"),
    "vllm.model_executor.layers.fused_moe.oracle.unquantized _trtllm_bf16_lora_supported": ("moe_config",),
}
"""Functions that the patches replace, with all their parameters."""

BEGINNINGS = {
    "vllm.v1.worker.gpu.sample.sampler Sampler.sample": ("self", "logits"),
    "vllm.v1.worker.lora_model_runner_mixin LoRAModelRunnerMixin.load_lora_model": ("self", "model"),
    "vllm.lora.punica_wrapper.punica_cpu PunicaWrapperCPU.add_lora_logits": _ADD_LORA,
    "vllm.lora.punica_wrapper.punica_gpu PunicaWrapperGPU.add_lora_logits": _ADD_LORA,
    "vllm.v1.engine.output_processor OutputProcessor.process_outputs": ("self", "engine_core_outputs"),
}
"""Functions that the patches replace with ones that pass on further parameters unread."""

CALLED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    f"{_CPU_RUNNER}._zero_block_ids": (("self", "block_ids"), ()),
    f"{_ENGINE}.from_engine_args": (("args",), ("usage_context",)),
    f"{_ENGINE}.generate": (("self", "prompt", "params", "name"), ("lora_request",)),
    f"{_ENGINE}.abort": (("self", "names"), ()),
    f"{_ENGINE}.pause_generation": (("self",), ("mode", "clear_cache")),
    f"{_ENGINE}.resume_generation": (("self",), ()),
    f"{_ENGINE}.collective_rpc": (("self", "method"), ("args",)),
    f"{_ENGINE}.add_lora": (("self", "lora"), ()),
    f"{_ENGINE}.remove_lora": (("self", "number"), ()),
    f"{_ENGINE}.shutdown": (("self",), ()),
    "vllm.lora.utils parse_fine_tuned_lora_name": (("name", "mapper"), ()),
    "vllm.model_executor.models.utils WeightsMapper.get_rename_mapper": (("self",), ()),
}
"""Functions that Tinsmith calls, with its positional and its named arguments."""

FIELDS = {
    "vllm.logprobs FlatLogprobs": "start_indices end_indices token_ids logprobs ranks decoded_tokens",
    "vllm.v1.core.sched.output SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs",
    "vllm.v1.core.sched.output NewRequestData": "block_ids num_computed_tokens",
    "vllm.v1.core.sched.output CachedRequestData": "req_ids new_block_ids num_computed_tokens resumed_req_ids",
    "vllm.v1.outputs ModelRunnerOutput": "prompt_token_id_logprobs_dict",
    "vllm.v1.worker.gpu.input_batch InputBatch": (
        "req_ids idx_mapping_np query_start_loc_np num_scheduled_tokens num_computed_prefill_tokens_np prefill_len_np"
    ),
}
"""Fields of vLLM's dataclasses that the patches read or write."""

ATTRIBUTES = {
    f"{_RUNNER} GPUModelRunner": "requests query_start_loc discard_request_mask input_batch device",
    "vllm.v1.worker.gpu_input_batch InputBatch": "generators req_id_to_index",
    _SCORES: "token_id_scores",
    "vllm.v1.engine.detokenizer FastIncrementalDetokenizer": "stream skip_special_tokens",
    "vllm.lora.worker_manager WorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager LoRAModelManager": "modules packed_modules model",
}
"""Attributes that vLLM's objects set and the patches read or write."""


def find(name: str) -> Any:
    module, _, path = name.partition(" ")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_function_has_the_parameters_of_its_replacement(name: str):
    assert parameters(find(name)) == REPLACED[name]


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_function_that_is_replaced_in_part_begins_with_the_same_parameters(name: str):
    assert parameters(find(name))[: len(BEGINNINGS[name])] == BEGINNINGS[name]


@pytest.mark.parametrize("name", CALLED)
def test_a_called_function_takes_the_arguments(name: str):
    given, named = CALLED[name]
    inspect.signature(find(name)).bind(*given, **dict.fromkeys(named))


@pytest.mark.parametrize("name", FIELDS)
def test_a_dataclass_has_the_fields(name: str):
    assert {*FIELDS[name].split()} <= {field.name for field in dataclasses.fields(find(name))}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_object_has_the_attributes(name: str):
    source = inspect.getsource(find(name))
    assert [each for each in ATTRIBUTES[name].split() if f"self.{each}" not in source] == []


@pytest.mark.parametrize("full", [False, True])
def test_the_engine_takes_the_arguments(full: bool, tmp_path: Path):
    settings = BaseModelSettings(name="base", path=str(architectures.build("qwen3-vl-moe", tmp_path)))
    given = engine_args(settings, base_model.skeleton(settings), 64, "float32", full=full)
    assert given["language_model_only"] and ("lora_target_modules" in given) != full
    assert given.keys() <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_no_other_argument_turns_on_speculative_decoding():
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {name for name in names if name.startswith(("spec_", "speculative"))} == {*SPECULATION}


def test_the_first_sampler_computes_the_logprobs_before_it_changes_the_logits():
    """The mask of a grammar is applied between the two."""
    source = inspect.getsource(find("vllm.v1.sample.sampler Sampler.forward"))
    assert 0 < source.index("self.compute_logprobs(logits)") < source.index("self.apply_logits_processors(")


def test_on_a_gpu_vllm_takes_no_sampler_that_it_must_compile(monkeypatch: pytest.MonkeyPatch):
    """Neither of its two model runners takes FlashInfer's."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_environment(BaseModelSettings(name="base", path="/m"))
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    sampler = find("vllm.v1.sample.ops.topk_topp_sampler TopKTopPSampler")()
    assert sampler.forward == sampler.forward_native
    assert "self.use_flashinfer = " in inspect.getsource(find("vllm.v1.worker.gpu.sample.sampler Sampler.__init__"))
    assert not find("vllm.v1.worker.gpu.sample.sampler flashinfer_sampler_supported")()


def test_a_request_takes_the_parameters():
    given = (
        "max_tokens seed temperature top_p top_k stop stop_token_ids ignore_eos logprobs flat_logprobs detokenize "
        "skip_special_tokens structured_outputs output_kind extra_args skip_reading_prefix_cache"
    )
    assert {*given.split()} <= {*parameters(SamplingParams)}

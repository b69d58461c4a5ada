"""The arguments that vLLM's engine starts with: its memory, its sequences, and the adapters that it takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from app.domain.sampling import MAX_TOP
from app.errors import SetupError
from app.settings import BaseModelSettings
from app.stack.memory import usable_bytes
from workers.backends.sampling.base import BATCH
from workers.backends.sampling.vllm.patches import MOST_HEAD_TOKENS
from workers.backends.sampling.vllm.slots import with_reserve
from workers.backends.sampling.vllm.worker import Extension
from workers.models import lora, target_modules
from workers.models.base_model import auto_class
from workers.models.loading.source import local_path

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_CPU_MEMORY = 4 * 2**30
# PyTorch may round a pinned copy up to twice its size, so this quarter may take half of the memory. The rest is for the
# trainers, for files in shared memory, and for the weights of a sampler that sleeps.
_ADAPTERS_SHARE = 0.25


def engine_args(
    settings: BaseModelSettings, skeleton: Any, max_context: int, dtype: str, *, full: bool = False
) -> dict[str, Any]:
    """Returns vLLM's engine arguments; `settings.sampler.engine_args` wins. With `full` it takes no adapters."""
    sampler = settings.sampler
    on_gpu = torch.cuda.is_available()
    return {
        "model": local_path(settings.path),
        "tokenizer": local_path(settings.tokenizer or settings.path),
        "dtype": dtype,
        "max_model_len": max_context,
        "tensor_parallel_size": sampler.tensor_parallel,
        "enforce_eager": not on_gpu,  # compiling for the CPU takes 80 s and gains little
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MAX_TOP,  # vLLM's own limit is 20
        "disable_log_stats": True,
        # vLLM's "auto" may choose a library that follows a schema only in part, and the first request's for all others.
        # Without free white space a sample cannot go on with it for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "worker_extension_cls": f"{Extension.__module__}.{Extension.__name__}",
        # No request has images, so a vision tower would only take memory.
        **({"language_model_only": True} if auto_class(skeleton.config) is AutoModelForImageTextToText else {}),
        **_sequences(sampler.max_batch, on_gpu),
        **_memory(sampler.memory_share, on_gpu),
        **({"enable_sleep_mode": True} if sampler.sleep and on_gpu else {}),
        **({} if full else _adapters(settings, skeleton, dtype, on_gpu)),
        **sampler.engine_args,
    }


def adapted(skeleton: Any) -> dict[str, list[str]]:
    """Returns the linears that vLLM takes adapters on, by group.

    It takes none on experts: nothing has shown that it applies these adapters rightly. Nor does it on a head beyond
    MOST_HEAD_TOKENS.
    """
    found = lora.targets(skeleton)
    without = {"mlp"} if target_modules.has_experts(skeleton) else set()
    if skeleton.config.get_text_config().vocab_size > MOST_HEAD_TOKENS:
        without.add("unembed")
    return {group: [] if group in without else paths for group, paths in found.items()}


def adapter_capacity(settings: BaseModelSettings, skeleton: Any, dtype: str) -> int:
    """Returns the number of adapters that stay loaded: `loaded_loras`, or those of `max_rank` that fit in a share of
    the host memory, which the base's samplers divide, but at least `max_loras`. Each of vLLM's worker processes holds
    them whole."""
    sampler, groups = settings.sampler, adapted(skeleton)
    shapes = (shape for group, pairs in lora.shapes(skeleton).items() if groups[group] for shape in pairs.values())
    a_rank = sum((inputs + outputs) * count for inputs, outputs, count in shapes)
    adapter_bytes: int = a_rank * settings.max_rank * getattr(torch, dtype).itemsize * sampler.gpus_needed
    fit = int(_ADAPTERS_SHARE * usable_bytes()) // (adapter_bytes * max(1, sampler.count))
    return max(sampler.max_loras, min(sampler.loaded_loras, fit))


def lora_rank(max_rank: int) -> int:
    """Returns vLLM's smallest rank setting that holds `max_rank`. Raises SetupError beyond its greatest."""
    for rank in _RANKS:
        if rank >= max_rank:
            return rank
    raise SetupError(f"max_rank is {max_rank}, but vLLM supports at most {_RANKS[-1]}; lower it, or use transformers")


def _adapters(settings: BaseModelSettings, skeleton: Any, dtype: str, on_gpu: bool) -> dict[str, Any]:
    of_base = int(not on_gpu)  # on a CPU the base takes one slot (see VllmAdapters)
    at_a_time = settings.sampler.engine_args.get("max_loras", settings.sampler.max_loras + of_base)
    return {
        "enable_lora": True,
        "max_loras": at_a_time,
        # vLLM keeps no more than max_loras by itself, and reads the others from their files again at each turn.
        "max_cpu_loras": max(at_a_time, adapter_capacity(settings, skeleton, dtype) + of_base),
        "max_lora_rank": lora_rank(settings.max_rank),
        **_target_modules(skeleton),
    }


def _target_modules(skeleton: Any) -> dict[str, list[str]]:
    """Names the linears of a model with experts; else vLLM reserves memory for adapters on each expert too."""
    if not target_modules.has_experts(skeleton):
        return {}
    paths = [path for group in adapted(skeleton).values() for path in group]
    return {"lora_target_modules": sorted({path.rpartition(".")[2] for path in paths})}


def _sequences(most: int, on_gpu: bool) -> dict[str, int]:
    """With 0 vLLM chooses by the GPU: 256, or 1,024 on an H100 or larger (`EngineArgs.get_batch_defaults` of 0.32)."""
    return {} if on_gpu and not most else {"max_num_seqs": with_reserve(most or BATCH)}


def _memory(share: float, on_gpu: bool) -> dict[str, float]:
    return {"gpu_memory_utilization": share} if on_gpu else {"kv_cache_memory_bytes": int(share * _CPU_MEMORY)}

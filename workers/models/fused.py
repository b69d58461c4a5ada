"""Fused GPU kernels in the place of a model's norms, rotary embeddings and gated activations: those of liger-kernel.

transformers computes each of them in some ten kernels that read and write whole activations. On an H100 this was a
third of the time of Qwen3-8B's layers, and a quarter of what autograd keeps of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from workers.models.target_modules import has_experts

log = logging.getLogger(__name__)
_NO_KERNELS = "no fused kernels, so layers take 1.5 times as long"
_ROTATE = "apply_rotary_pos_emb"
Rotate = Callable[..., tuple[Tensor, Tensor]]
"""Maps query and key [B, heads, T, D], cos and sin [B, T, D] to the turned query and key."""


def usable(device: torch.device) -> bool:
    """Returns whether the kernels run on `device`. If they should but do not, the log says why and what to do."""
    if device.type != "cuda":
        return False
    if find_spec("liger_kernel") is None:
        log.warning(
            "%s: liger-kernel is not installed. Run `pip install liger-kernel`, or `make setup GPU=1` in a checkout",
            _NO_KERNELS,
        )
        return False
    from liger_kernel.ops import LigerRMSNormFunction

    try:
        LigerRMSNormFunction.apply(torch.ones(1, 8, device=device), torch.ones(8, device=device), 1e-6)
    except Exception as error:  # Triton compiles when a kernel is first used, and passes on any error
        log.warning(
            "%s: Triton cannot compile (%s). It needs a C compiler and Python's headers: apt install gcc python3-dev",
            _NO_KERNELS,
            error,
        )
        return False
    return True


def fuse(model: Any) -> bool:
    """Gives a transformers PreTrainedModel the fused kernels that there are for its architecture, in place.

    Returns False, and changes nothing, if liger-kernel does not know the architecture. So it does, with a line in the
    log, if liger-kernel needs a class of the architecture that another version of transformers had.
    """
    from liger_kernel.transformers.model import output_classes
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    architecture = model.config.model_type
    if architecture not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    gate = None if has_experts(model) else _gate(model.config)  # workers/models/experts.py computes experts
    kernels = {
        "rms_norm": True,
        "rope": not architecture.startswith("qwen3_5"),  # liger-kernel has none for it, and raises an error
        "swiglu": gate in ("silu", "swish"),
        "geglu": gate == "gelu_pytorch_tanh",
        "layer_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    # transformers 5.23 has no such class any more. liger-kernel imports it for its cross-entropy, which is off here.
    vars(output_classes).setdefault("LigerQwen3VLCausalLMOutputWithPast", object)
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        apply_liger_kernel(model, kernels)
    except ImportError as error:
        vars(module).update(before)
        log.warning("%s: liger-kernel does not go with this transformers (%s)", _NO_KERNELS, error)
        return False
    finally:
        _restore(vars(module), before)
    return True


def _gate(config: Any) -> str | None:
    """The activation of the MLPs, which liger-kernel takes for granted."""
    text = config.get_text_config()
    return getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)


def _restore(module: dict[str, Any], before: dict[str, Any]) -> None:
    """Takes back what liger-kernel changed for other models of this process. The layers of all of them look up the
    rotary embeddings in their module: these are fused on a GPU alone."""
    for name, value in before.items():
        if module[name] is not value:
            module[name] = partial(_rotated, value, module[name]) if name == _ROTATE else value


def _rotated(plain: Rotate, fused: Rotate, q: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return (fused if _on_gpu(q) else plain)(q, *others, **named)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda

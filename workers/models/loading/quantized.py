"""Quantises a base model's weights one by one, as transformers reads them: the plain model is never whole in memory.

This is a quantiser in transformers' registry. It leaves no trace in the loaded model's configuration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from workers.models import experts, quantized, target_modules

_METHOD = "tinsmith"


@register_quantization_config(_METHOD)
class QuantizeOnLoad(QuantizationConfigMixin):  # type: ignore[misc]
    """The argument `quantization_config` of from_pretrained: the weights become `kind` (nf4, int8 or fp8) on
    `device`."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self.quant_method, self.kind, self.device = _METHOD, kind, device


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        self.names = names(model)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return param_name in self.names

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def names(model: nn.Module) -> set[str]:
    """The names of the parameters of a bare model that are quantised: those of linears and stacked experts that
    adapters can sit on, except the head, whose weight the loss reads."""
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = target_modules.groups(linears, experts=False)
    stacked = {f"{path}.{name}" for path, module in experts.found(model).items() for name in experts.names(module)}
    return {f"{path}.weight" for path in (*found["attn"], *found["mlp"])} | stacked


class _Quantize(ConversionOps):  # type: ignore[misc]
    """The last step of reading a parameter."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str], **_: Any
    ) -> dict[str, Any]:
        """Installs the tensors of `input_dict` that are quantised, and returns the others."""
        config, rest = self.quantizer.quantization_config, {}
        for name, value in input_dict.items():
            if name not in self.quantizer.names:
                rest[name] = value
                continue
            tensor: Tensor = value[0] if isinstance(value, list) else value
            quantized.install(model, name, tensor.to(config.device), config.kind)
            missing_keys.discard(name)
            module: Any = model.get_submodule(name.rpartition(".")[0])
            module._is_hf_initialized = True  # else transformers would fill it with random numbers
        return rest

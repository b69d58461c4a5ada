"""Splits a base model's parameters over ranks one by one, as transformers reads them: the model is whole on no rank.

This is a quantiser in transformers' registry, as in quantized.py, though it changes no number. So transformers itself
still converts experts, ties parameters, makes buffers and reports what is missing. It leaves no trace in the
loaded model's configuration.

safetensors maps the files into memory. Of a tensor that needs no conversion, a rank reads the pages of its share alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD = "tinsmith_shards"
Split = Callable[[str, nn.Parameter], None]
"""Keeps a rank's share of the parameter of a name and frees the rest, or leaves it as it is."""


@register_quantization_config(_METHOD)
class ShardOnLoad(QuantizationConfigMixin):  # type: ignore[misc]
    """The argument `quantization_config` of from_pretrained: parameters become `dtype`, and each is split when it is
    read.

    Those that the configuration ties are left whole, since transformers compares them. So are those that are not in
    the files.
    """

    def __init__(self, split: Split, dtype: torch.dtype) -> None:
        self.quant_method, self.split, self.dtype = _METHOD, split, dtype


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        tied = model.all_tied_weights_keys
        self.whole = {*tied, *tied.values()}
        self.failure: Exception | None = None

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return True

    def get_quantize_ops(self) -> ConversionOps:
        return _Shard(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        self.remove_quantization_config(model)
        if self.failure is not None:
            raise self.failure
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Shard(ConversionOps):  # type: ignore[misc]
    """The last step of reading a parameter.

    A failure is kept until transformers is through, and nothing is read any more: transformers itself would go on, and
    then raise an error without the cause.
    """

    def __init__(self, quantizer: _Quantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: nn.Module, missing_keys: set[str], **_: Any
    ) -> dict[str, Any]:
        """Installs the parameters of `input_dict` that are split, and returns the other tensors."""
        rest: dict[str, Any] = {}
        for name, value in input_dict.items():
            missing_keys.discard(name)
            try:
                if self.quantizer.failure is None:
                    rest |= self._not_split(model, name, value[0] if isinstance(value, list) else value)
            except Exception as error:
                self.quantizer.failure = error
        return rest

    def _not_split(self, model: nn.Module, name: str, tensor: Tensor) -> dict[str, Any]:
        config: Any = self.quantizer.quantization_config
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        wanted = getattr(module, leaf, None)
        if wanted is not None and wanted.shape != tensor.shape:  # where there is a quantiser, transformers takes any
            raise ValueError("its weights do not have the shapes that its config.json gives")
        if not isinstance(wanted, nn.Parameter):
            return {name: tensor}
        parameter: Any = nn.Parameter(tensor.to(config.dtype), requires_grad=False)
        if name in self.quantizer.whole:
            return {name: parameter}
        config.split(name, parameter)
        parameter._is_hf_initialized = True  # else transformers would fill it with random numbers
        setattr(module, leaf, parameter)
        return {}

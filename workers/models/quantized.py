"""Weights of a frozen base model in 4 or 8 bits, by bitsandbytes: stored as codes, and computed with as if plain.

A weight is cut into blocks of 64 numbers. A block has one fp32 scale, its greatest absolute value; each of its numbers
is the nearest code of a table, times the scale. The codes take the place of the parameter, under its name.

A product sees the dequantised weight, in the model's dtype. Autograd does not keep it: the backward pass dequantises
again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import SetupError

BLOCK = 64
"""Numbers that share a scale: 0.5 bits a number beside the 4 or 8 of its code."""
_NF4 = "nf4"


class QuantizedWeight(nn.Module):
    """A tensor of any shape as uint8 codes and fp32 scales. `dtype` is that of the dequantised tensor."""

    codes: Tensor
    scales: Tensor
    table: Tensor

    def __init__(self, weight: Tensor, kind: str) -> None:
        """Quantises `weight`, fp32 or bf16, on its device. `kind`: nf4, int8 or fp8."""
        super().__init__()
        self.shape, self.dtype, self._kind = weight.shape, weight.dtype, kind
        table = _table(kind).to(weight.device)
        weight = weight.detach().contiguous()
        if kind == _NF4:
            codes, scales = _operators().quantize_4bit(weight, BLOCK, kind, torch.uint8)
        else:
            codes, scales = _operators().quantize_blockwise(weight, table, BLOCK)
        for name, buffer in (("codes", codes), ("scales", scales), ("table", table)):
            self.register_buffer(name, buffer)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantized(self) -> Tensor:
        """The tensor that this weight stands for. The same codes always give the same bits."""
        if self._kind == _NF4:
            rows = self.shape
            if rows[-1] % 2:  # two codes share a byte; for odd rows bitsandbytes would compile a kernel with torch
                rows = torch.Size([1, 2 * self.codes.numel()])
            found = _operators().dequantize_4bit(self.codes, self.scales, BLOCK, _NF4, rows, self.dtype)
        else:
            found = _operators().dequantize_blockwise(self.codes, self.scales, self.table, BLOCK, self.dtype)
        return found.view(-1)[: self.shape.numel()].view(self.shape)  # type: ignore[no-any-return]


class QuantizedLinear(nn.Linear):
    """A frozen linear with a quantised weight; a bias stays as it is."""

    weight: QuantizedWeight  # type: ignore[assignment]

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = weight
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        with for_product(self.weight) as weight:
            return nn.functional.linear(x, weight, self.bias)


@contextmanager
def for_product(weight: Tensor | QuantizedWeight) -> Iterator[Tensor]:
    """Yields the tensor of a weight, plain or quantised, for products within the block.

    Where autograd would keep the dequantised tensor, or a view of it, it keeps the codes. Of a weight that ZeRO-3 has
    gathered, it keeps only the view's shape: the view would hold the gathered weight in memory until the backward pass,
    for which DeepSpeed gathers it again.
    """
    if isinstance(weight, Tensor) and not hasattr(weight, "ds_id"):
        yield weight
        return
    tensor = plain(weight)
    at, start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()

    def pack(saved: Tensor) -> Any:
        is_view = saved.untyped_storage().data_ptr() == at
        return (saved.size(), saved.stride(), saved.storage_offset() - start) if is_view else saved

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        size, stride, offset = kept
        again = plain(weight).detach()
        return again.as_strided(size, stride, again.storage_offset() + offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield tensor


def install(model: nn.Module, name: str, tensor: Tensor, kind: str) -> None:
    """Puts `tensor`, quantised, in the place of the model's parameter of this name."""
    path, _, leaf = name.rpartition(".")
    module, weight = model.get_submodule(path), QuantizedWeight(tensor, kind)
    if isinstance(module, nn.Linear):
        model.set_submodule(path, QuantizedLinear(module, weight))
    else:
        delattr(module, leaf)
        setattr(module, leaf, weight)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
    """Yields every weight by its parameter's name: the plain ones, tied ones as often as they have a name, and then the
    quantised ones."""
    yield from model.named_parameters(remove_duplicate=False)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield name, module


def plain(weight: Tensor | QuantizedWeight) -> Tensor:
    """The weight's tensor, dequantised if need be."""
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


@cache
def _table(kind: str) -> Tensor:
    """The 256 numbers of an 8-bit code, fp32, sorted, the greatest 1. bitsandbytes itself knows the 16 of NF4.

    fp8 is E4M3FN of the OCP 8-bit Floating Point Specification (OFP8) 1.0, over its greatest number, 448; the two codes
    of NaN stand for that number once more.
    """
    if kind == "int8":
        return torch.arange(-128, 128) / 127
    if kind == "fp8":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        return numbers.nan_to_num(448).sort().values / 448
    return torch.empty(0)


@cache
def _operators() -> Any:
    """bitsandbytes' operators. Raises SetupError when it is not installed.

    Importing it takes 3 s. If `kernels` were installed, the import would download a compiled kernel and load it, so
    this hides `kernels` meanwhile. Nothing here calls that kernel.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    hidden = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"a base model in 4 or 8 bits needs bitsandbytes, which cannot be imported ({error}): run "
            "`pip install 'tinsmith[train]'`, or set its dtype to auto"
        ) from error
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden
    return torch.ops.bitsandbytes

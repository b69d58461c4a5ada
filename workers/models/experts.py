"""LoRA on stacked experts: the adapters' products beside transformers' grouped products, for each expert's own tokens.

A pair has the layout of PEFT files, which stack the experts' pairs: `a` [experts · rank, in], expert after expert, and
`b` [out, rank · experts], where an expert has every `experts`-th column. A pair's path is PEFT's too: the wrapper
around the first tensor lies inside the second's, so `experts.base_layer` is gate_up_proj and `experts` is down_proj.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, _grouped_linear, _grouped_mm

from workers.models import coverage
from workers.models.quantized import QuantizedWeight, for_product

NAME = "tinsmith_lora"
_SUFFIXES = {"gate_up_proj": ".base_layer", "down_proj": ""}
NAMES = tuple(_SUFFIXES)
"""The names of the stacked tensors."""
# grouped products need rows of a multiple of 16 bytes: 8 numbers of bf16
_ALIGNMENT = 8


def found(model: nn.Module) -> dict[str, nn.Module]:
    """The stacked experts that adapters can sit on, by module path, in the model's order."""
    modules = model.named_modules()
    return {path: module for path, module in modules if _supported(module) and coverage.trains_experts(path)}


def paths(model: nn.Module) -> list[str]:
    """The paths of the pairs on experts, in the model's order."""
    return [path + suffix for path in found(model) for suffix in _SUFFIXES.values()]


def is_pair(path: str) -> bool:
    """True for the path of a pair on experts."""
    return path.endswith((".experts", ".experts.base_layer"))


def target_parameters() -> list[str]:
    """The tensors as PEFT's `target_parameters` names them."""
    return [f"experts.{name}" for name in _SUFFIXES]


def pair_path(parameter: str) -> str:
    """The path of the pair on a stacked tensor, by the tensor's name; any other name is returned unchanged."""
    module, _, name = parameter.rpartition(".")
    return module + _SUFFIXES[name] if module.endswith(".experts") and name in _SUFFIXES else parameter


def shape(model: nn.Module, path: str) -> tuple[int, int, int]:
    """(experts, in, out) of the tensor under a pair. ZeRO-3 empties the tensor's shape, so its record is used."""
    module: Any = model.get_submodule(path.removesuffix(".base_layer"))
    weight = module.gate_up_proj if path.endswith(".base_layer") else module.down_proj
    count, rows, columns = getattr(weight, "ds_shape", weight.shape)
    return (count, rows, columns) if module.is_transposed else (count, columns, rows)


def merged(module: Any, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The module's fp32 stacked tensor [experts, out, in], or transposed [experts, in, out], plus scaling · B A."""
    stacked_a, stacked_b = _stacked(a, b, len(weight))
    added = torch.bmm(stacked_b, stacked_a)
    return weight + scaling * (added.mT if module.is_transposed else added)


def wrap(model: Any, shares: Callable[[], Sequence[tuple[Any, int]]]) -> None:
    """Makes the model's experts add the products of the adapters that `shares` returns, see workers.models.lora.use."""

    def forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return _forward(module, hidden, chosen, weights, shares())

    ExpertsInterface.register(NAME, forward)
    modules = found(model)
    for path, module in modules.items():
        module.lora_path = path  # type: ignore[assignment]
    if modules:
        model.set_experts_implementation(NAME)


def _supported(module: Any) -> bool:
    stacked = all(isinstance(getattr(module, name, None), nn.Parameter | QuantizedWeight) for name in NAMES)
    return stacked and hasattr(module, "_apply_gate") and getattr(module, "has_gate", False)


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, segments: Sequence[Any]) -> Tensor:
    """Maps hidden states [tokens, width] to the experts' weighted sum, as transformers' grouped_mm does."""
    top, count = chosen.shape[1], module.num_experts
    experts, order = torch.sort(chosen.reshape(-1), stable=True)
    offsets = _ends(experts, count)
    rows = _AdapterRows(segments, module.lora_path, len(hidden), order // top, experts, count)
    x = hidden[order // top]
    for name, suffix in _SUFFIXES.items():
        bias = getattr(module, f"{name}_bias")[experts] if module.has_bias else None
        with for_product(getattr(module, name)) as weight:
            out = _grouped_linear(x, weight, offsets, bias, module.is_transposed)
        out = rows.add(x, out, module.lora_path + suffix)
        x = module._apply_gate(out) if name == "gate_up_proj" else out
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    weighted = (x * weights.reshape(-1)[order, None])[back]
    return weighted.view(len(hidden), top, -1).sum(1).to(hidden.dtype)


def _ends(groups: Tensor, count: int) -> Tensor:
    return torch.bincount(groups, minlength=count).cumsum(0).to(torch.int32)


class _AdapterRows:
    """The rows (a token and one of its experts) that have an adapter, sorted by adapter and expert."""

    def __init__(
        self, segments: Sequence[Any], path: str, tokens: int, token: Tensor, experts: Tensor, count: int
    ) -> None:
        self.count = count
        self.adapters = list(dict.fromkeys(a for a, _ in segments if a is not None and path in a.pairs))
        if not self.adapters:
            return
        unit = tokens // max(1, sum(share for _, share in segments))
        numbers = {adapter: number for number, adapter in enumerate(self.adapters)}
        owner = torch.cat(
            [
                torch.full((share * unit,), numbers.get(adapter, len(numbers)), device=token.device)
                for adapter, share in segments
            ]
        )
        groups, order = torch.sort(owner[token] * count + experts, stable=True)
        adapted = sum(share for adapter, share in segments if adapter in numbers) * unit * (len(token) // tokens)
        self.rows, groups = order[:adapted], groups[:adapted]
        self.ends = _ends(groups, len(numbers) * count)
        scalings = torch.tensor([adapter.scaling for adapter in self.adapters], device=token.device)
        self.scaling = scalings[groups // count, None]

    def add(self, x: Tensor, out: Tensor, path: str) -> Tensor:
        """Adds scaling · x Aᵀ Bᵀ of each row's adapter and expert to `out`."""
        if not self.adapters:
            return out
        rank = max(adapter.spec.rank for adapter in self.adapters)
        rank += -rank % _ALIGNMENT
        pairs = [self._padded(*_stacked(a.pairs[path].a, a.pairs[path].b, self.count), rank) for a in self.adapters]
        a, b = (torch.cat(parts).to(x.dtype) for parts in zip(*pairs, strict=True))
        low = _grouped_mm(x[self.rows], a.mT, self.ends) * self.scaling.to(x.dtype)
        return out.index_add(0, self.rows, _grouped_mm(low, b.mT, self.ends))

    @staticmethod
    def _padded(a: Tensor, b: Tensor, rank: int) -> Iterator[Tensor]:
        missing = rank - a.shape[1]
        yield nn.functional.pad(a, (0, 0, 0, missing))
        yield nn.functional.pad(b, (0, missing))


def _stacked(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A [experts, rank, in] and B [experts, out, rank] of a pair."""
    return a.view(count, -1, a.shape[1]), b.view(len(b), -1, count).permute(2, 0, 1)

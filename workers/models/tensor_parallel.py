"""Tensor parallelism: each rank of a group keeps a part of the frozen base's layers, and all run the same tokens.

transformers' plans for a model say how. A column-wise linear keeps a part of its outputs, and the row-wise one behind
it the same part of its inputs: between the two a rank has its own heads, or its own units of an MLP. Where there are
more ranks than key-value heads, several have the same one. Of stacked experts a rank keeps some whole (expert
parallelism). What row-wise linears and experts give are parts of a sum, which the ranks add up. On the way back they
add up the gradient of what column-wise linears and experts take. Embeddings, norms, routers and the head are whole on
each rank.

An adapter is whole on each rank, so its files and its optimizer's state are as without a group. In a pass a rank uses
the part of each pair that goes with its part of the weight. The sum of the ranks' gradients is the gradient.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.errors import SetupError
from workers.models import experts, lora
from workers.models.adapter import Adapter, LoraPair

_COLUMNS, _ROWS, _EXPERTS = "colwise", "rowwise", "grouped_gemm"
_KEY_VALUES = ("k_proj", "v_proj")


class SplitLayers:
    """Part `rank` of `size` of a model's layers. `group`: the process group of the ranks that have the parts."""

    def __init__(self, model: Any, rank: int, size: int, group: Any) -> None:
        """`model`: the bare transformers PreTrainedModel, without weights.

        Raises SetupError where transformers' plans do not split all that adapters sit on, or not evenly.
        """
        self._rank, self._size, self._group = rank, size, group
        self._styles = _styles(model)
        if reason := _unsplit(model, self._styles) or self._uneven(model):
            raise SetupError(f"{type(model).__name__} cannot run with trainer.tensor_parallel = {size}: {reason}")
        # Of each part, where several ranks have the same.
        self._copies = {path: _copies(model, path, size) for path in self._styles}

    def split(self, name: str, parameter: nn.Parameter) -> None:
        """Cuts a parameter of the model, by its name, to this rank's part. It is called as it is read."""
        path, _, leaf = name.rpartition(".")
        style = self._styles.get(path)
        if style == _ROWS and leaf == "bias":
            if self._rank:  # the ranks' outputs are added up, and the bias counts once
                parameter.data.zero_()
        elif style is not None:
            dim = 1 if style == _ROWS else 0
            own = self._share(path, parameter.shape[dim])
            parameter.data = parameter.data.narrow(dim, own.start, len(own)).clone()

    def connect(self, model: nn.Module) -> None:
        """Makes the layers of `model`, split and then wrapped for adapters, add up with the other ranks' parts."""
        for path in sorted(_entries(self._styles)):
            model.get_submodule(path).register_forward_pre_hook(partial(_enter, self._group), with_kwargs=True)
        for path, style in self._styles.items():
            module: Any = model.get_submodule(path)
            if style == _EXPERTS:
                experts.keep(module, self._share(path, module.num_experts))
                module.register_forward_pre_hook(partial(_enter_experts, self._group))
            if style != _COLUMNS:
                module.register_forward_hook(partial(_leave, self._group))

    def own(self, adapter: Adapter) -> Adapter:
        """Returns the adapter with this rank's part of each pair. The gradient of a part goes to the whole pair."""
        rank = adapter.spec.rank
        pairs = {path: self._own(path, pair, rank) for path, pair in adapter.pairs.items()}
        return replace(adapter, pairs=pairs, flat=None, row=None)

    def whole(self, name: str, weight: Tensor) -> Tensor:
        """Returns all of a weight, by its name in an unwrapped model; a collective of the group. A row-wise linear's
        bias is the one of rank 0, since the others have zeros."""
        path, _, leaf = name.rpartition(".")
        style = self._styles.get(path)
        if style is None or (style == _ROWS and leaf == "bias"):
            return weight
        parts = [torch.empty_like(weight) for _ in range(self._size)]
        dist.all_gather(parts, weight.contiguous(), group=self._group)
        return torch.cat(parts[:: self._copies[path]], 1 if style == _ROWS else 0)

    def _share(self, path: str, count: int) -> range:
        copies = self._copies[path]
        each = count * copies // self._size
        start = self._rank // copies * each
        return range(start, start + each)

    def _uneven(self, model: nn.Module) -> str | None:
        for path, style in self._styles.items():
            module: Any = model.get_submodule(path)
            shared = {_COLUMNS: "out_features", _ROWS: "in_features", _EXPERTS: "num_experts"}[style]
            if getattr(module, shared) * _copies(model, path, self._size) % self._size:
                return f"{path} has {shared} = {getattr(module, shared)}, which cannot be divided by it"
        return None

    def _own(self, path: str, pair: LoraPair, rank: int) -> LoraPair:
        a: Tensor = pair.a
        b: Tensor = pair.b
        if experts.is_pair(path):
            count = len(a) // rank
            a, b = experts.part(a, b, count, self._share(experts.module_path(path), count))
        elif self._styles.get(path) == _COLUMNS:
            own = self._share(path, len(b))
            b = b[own.start : own.stop]
        elif self._styles.get(path) == _ROWS:
            own = self._share(path, a.shape[1])
            a = a[:, own.start : own.stop].contiguous()  # copies of unlike strides are slow: products/grouped.py
        return LoraPair(cast(nn.Parameter, a), cast(nn.Parameter, b))


def _styles(model: Any) -> dict[str, str]:
    """Returns the styles, by path, that transformers' plans give to linears, and to modules of stacked experts."""
    stacked = experts.found(model)
    linears = (path for path, module in model.named_modules() if isinstance(module, nn.Linear))
    found = {path: (model._tp_plan or {}).get(_pattern(path)) for path in linears}
    for path, module in stacked.items():
        given = {(model._ep_plan or {}).get(_pattern(f"{path}.{name}")) for name in experts.names(module)}
        found[path] = _EXPERTS if given == {_EXPERTS} and experts.can_keep_some(module) else None
    return {path: style for path, style in found.items() if style in (_COLUMNS, _ROWS, _EXPERTS)}


def _entries(styles: Mapping[str, str]) -> set[str]:
    """Returns the paths of the modules with column-wise linears, which share the module's input."""
    return {_parent(path) for path, style in styles.items() if style == _COLUMNS}


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _copies(model: nn.Module, path: str, size: int) -> int:
    """Returns how many of `size` ranks have the same part: of keys and values several, where there are fewer heads."""
    parent, _, name = path.rpartition(".")
    if name not in _KEY_VALUES:
        return 1
    linear: Any = model.get_submodule(path)
    attention: Any = model.get_submodule(parent)
    heads: int = linear.out_features // attention.head_dim
    return max(1, size // heads)


def _pattern(path: str) -> str:
    """The path as transformers' plans have it."""
    return re.sub(r"[0-9]+(?=\.)", "*", path)


def _unsplit(model: nn.Module, styles: Mapping[str, str]) -> str | None:
    """Says what would be wrong where a module stays whole on each rank: an adapter on it would get its gradient several
    times, and beside column-wise linears its input would."""
    adapted = [path for group, paths in lora.targets(model).items() if group != "unembed" for path in paths]
    whole = [path for path in map(experts.module_path, adapted) if path not in styles]
    entries = _entries(styles)
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    # A norm with a weight for each head, such as Cohere's.
    with_matrices = [_parent(name) for name, parameter in model.named_parameters() if parameter.dim() > 1]
    whole += [path for path in (*linears, *with_matrices) if _parent(path) in entries and path not in styles]
    return f"transformers has no plan that splits {whole[0]} as it needs" if whole else None


def _enter(group: Any, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Before a module with column-wise linears, whose first input they share."""
    if inputs:
        return (_summed_back(inputs[0], group), *inputs[1:]), named
    return inputs, {**named, "hidden_states": _summed_back(named["hidden_states"], group)}


def _enter_experts(group: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Before experts: they take hidden states, the experts' numbers, and the weights that a router gives them."""
    return tuple(_summed_back(one, group) if one.is_floating_point() else one for one in inputs)


def _leave(group: Any, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return _Sum.apply(output, group)  # type: ignore[no-any-return,no-untyped-call]


def _summed_back(x: Tensor, group: Any) -> Tensor:
    return _SumGradients.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def _sum(part: Tensor, group: Any) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Sum(torch.autograd.Function):
    """The sum of the ranks' parts. Each part's gradient is the sum's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumGradients(torch.autograd.Function):
    """The same tensor, whose gradient is the sum of the ranks' parts of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None

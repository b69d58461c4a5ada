"""LoRA adapters beside a frozen base: many adapters of any rank, chosen token by token inside one forward pass.

`wrap` puts a `LoraLinear` around every linear an adapter may sit on; `use` says which tokens belong to which adapter.
The choice is a context variable, so passes in different threads do not see each other. An adapter is kept as fp32
masters and cast to the activation's dtype in compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate, groupby
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from app.domain.adapters import Shape
from app.domain.ops import LoraSpec
from app.errors import UserOpError
from workers.models import experts, target_modules
from workers.models.adapter import Adapter, LoraPair, Segments, together
from workers.models.products import batched, grouped


class StackedSegments(tuple[tuple[Adapter | None, int], ...]):
    """Segments with the stacks of their adapters for grouped products, made at their first use and then kept.

    So a micro-batch stacks the adapters once, and layers that are computed again share the stacks. The adapters'
    weights must not change as long as the segments are used.
    """

    def __init__(self, segments: Iterable[tuple[Adapter | None, int]] = ()) -> None:
        self._stacks: dict[torch.dtype, Mapping[str, grouped.Stack]] = {}
        self._gradients: dict[torch.dtype, grouped.Gradients] = {}
        self._ends: dict[int, Tensor] = {}
        self._whole: StackedSegments | None = None
        self._first = 0
        self.ready: dict[str, tuple[Tensor, Tensor]] = {}
        """Inputs and outputs of linears that were computed together with another one, by their paths."""

    def part(self, rows: slice) -> StackedSegments:
        """Returns the shares within `rows`. Their stacks are parts of these ones, not copies."""
        ends = [*accumulate(count for _, count in self)]
        if rows.start == 0 and ends and rows.stop >= ends[-1]:
            return self
        found = StackedSegments(within(self, rows))
        found._whole, found._first = self, bisect_right(ends, rows.start)
        return found

    def stack(self, path: str, like: Tensor) -> grouped.Stack | None:
        """Returns the stack that holds a linear, of the dtype and on the device of `like`; None if no adapter is on
        it."""
        if self._whole is not None:
            whole = self._whole.stack(path, like)
            own = None if whole is None else whole.within(slice(self._first, self._first + len(self)))
            return own if own is not None and any(pair for pairs in own.linears.values() for pair in pairs) else None
        if like.dtype not in self._stacks:
            self._stacks[like.dtype], self._gradients[like.dtype] = self._stacked(like)
        return self._stacks[like.dtype].get(path)

    def gradients(self, dtype: torch.dtype) -> grouped.Gradients:
        """Returns what takes the gradients of the stacks of this dtype, which `stack` has made."""
        return self._gradients[dtype] if self._whole is None else self._whole.gradients(dtype)

    def ends(self, x: Tensor) -> Tensor | None:
        """Returns where the segments end in x [tokens, features], int32 on its device; None for one segment."""
        if len(self) == 1:
            return None
        if len(x) not in self._ends:
            unit = len(x) // sum(count for _, count in self)
            counts = [unit * count for _, count in self]
            self._ends[len(x)] = torch.tensor([*accumulate(counts)], dtype=torch.int32).to(x.device, non_blocking=True)
        return self._ends[len(x)]

    def _stacked(self, like: Tensor) -> tuple[Mapping[str, grouped.Stack], grouped.Gradients]:
        adapters = [adapter for adapter, _ in self]
        groups = together(path for one in adapters if one is not None for path in one.linears)
        rank = max((one.spec.rank for one in adapters if one is not None), default=0)
        segments = [grouped.Segment(_scaling(one), _row(one, sum(map(len, groups)), rank)) for one in adapters]
        pairs = [{path: [_tensors(one, path) for one in adapters] for path in group} for group in groups]
        return grouped.stacked(pairs, segments, like)


def _row(adapter: Adapter | None, linears: int, rank: int) -> nn.Parameter | None:
    """The tensor of an adapter that lies as a row of stacks of `linears` linears and this rank, if it has one."""
    if adapter is None or len(adapter.linears) != linears or adapter.spec.rank != rank or not grouped.is_aligned(rank):
        return None
    return adapter.row


def _scaling(adapter: Adapter | None) -> float:
    return 0.0 if adapter is None else adapter.scaling


def _tensors(adapter: Adapter | None, path: str) -> tuple[Tensor, Tensor] | None:
    pair = None if adapter is None else adapter.pairs.get(path)
    return None if pair is None else (pair.a, pair.b)


# The default has no adapter, so sharing it shares nothing.
_segments: ContextVar[StackedSegments] = ContextVar("lora_segments", default=StackedSegments())  # noqa: B039


@contextmanager
def use(segments: Segments) -> Iterator[None]:
    """Within the block, a forward's rows belong to these adapters.

    Segments are counted in tokens, or in rows of equally many tokens.
    """
    found = segments if isinstance(segments, StackedSegments) else StackedSegments(segments)
    token = _segments.set(found)
    try:
        yield
    finally:
        _segments.reset(token)
        found.ready.clear()  # after an error, outputs there keep the graph alive, and it these segments


def in_use() -> StackedSegments:
    """The segments that `use` set in this context."""
    return _segments.get()


def within(segments: Segments, rows: slice) -> Iterator[tuple[Adapter | None, int]]:
    """Yields the shares of the segments that lie within `rows`, with their numbers of rows there."""
    end = 0
    for adapter, count in segments:
        start, end = end, end + count
        if (share := min(end, rows.stop) - max(start, rows.start)) > 0:
            yield adapter, share


class LoraLinear(nn.Module):
    """A linear plus the adapters that `use` names. The linear stays a submodule, so hooks on it still run."""

    def __init__(self, base: nn.Linear, path: str) -> None:
        super().__init__()
        self.base = base
        self.path = path
        self.together: Sequence[LoraLinear] = (self,)
        """The linears that read the same input, this one too."""

    def forward(self, x: Tensor) -> Tensor:
        segments = _segments.get()
        read, made = segments.ready.pop(self.path, (None, None))
        if read is x and made is not None:
            return made
        flat = x.reshape(-1, x.shape[-1])
        if grouped.joins(self.base, flat, len(segments)) and (stack := segments.stack(self.path, flat)):
            return self._joined(x, flat, stack, segments)
        out: Tensor = self.base(x)
        rows = out.reshape(-1, out.shape[-1])
        if grouped.suits(flat, rows, len(segments)):
            stack = segments.stack(self.path, flat)
            if stack is None:
                return out
            return grouped.added(flat, out, stack.only(self.path), segments.ends(flat), segments.gradients(flat.dtype))
        return batched.added(flat, out, [*_runs(segments, self.path, len(flat))])

    def _joined(self, x: Tensor, flat: Tensor, stack: grouped.Stack, segments: StackedSegments) -> Tensor:
        """Computes all linears of the stack with their adapters, if it can, and leaves the others' outputs to them."""
        linears = {one.path: one.base for one in self.together}
        if linears.keys() != stack.linears.keys() or not all(
            grouped.joins(linear, flat, len(segments)) for linear in linears.values()
        ):
            linears, stack = {self.path: self.base}, stack.only(self.path)
        bases = [linears[path] for path in stack.linears]
        outs = grouped.joined(flat, bases, stack, segments.ends(flat), segments.gradients(flat.dtype))
        made = {path: out.view(*x.shape[:-1], out.shape[1]) for path, out in zip(stack.linears, outs, strict=True)}
        own = made.pop(self.path)
        segments.ready.update({path: (x, out) for path, out in made.items()})
        return own


def _runs(segments: Segments, path: str, tokens: int) -> Iterator[batched.Run]:
    def likeness(segment: tuple[Adapter | None, int]) -> tuple[int, int, float]:
        adapter, count = segment
        if adapter is None or path not in adapter.pairs:
            return 0, 0, 0.0
        return count, adapter.spec.rank, adapter.scaling

    unit = tokens // max(1, sum(count for _, count in segments))
    start = 0
    for (_, _, scaling), group in groupby(segments, likeness):
        alike = [*group]
        rows = slice(start, start + unit * sum(count for _, count in alike))
        start = rows.stop
        yield batched.Run(
            rows, [pair for adapter, _ in alike if scaling and (pair := _tensors(adapter, path))], scaling
        )


def wrap(model: nn.Module) -> None:
    """Replaces, in place, every linear `targets` names by a LoraLinear around it, and prepares the experts."""
    experts.wrap(model, in_use)
    wrapped = {}
    for path in [path for paths in targets(model).values() for path in paths if not experts.is_pair(path)]:
        parent, _, name = path.rpartition(".")
        linear = model.get_submodule(path)
        if isinstance(linear, nn.Linear):
            wrapped[path] = LoraLinear(linear, path)
            setattr(model.get_submodule(parent), name, wrapped[path])
    for group in together(wrapped):
        for path in group:
            wrapped[path].together = [wrapped[one] for one in group]


def merged(model: nn.Module, name: str, weight: Tensor, pair: LoraPair, scaling: float) -> Tensor:
    """Returns W + scaling · B A (Hu et al. 2021, LoRA, section 4.1) for the weight of this name in an unwrapped model.

    Computed in fp32 and rounded once, to the weight's dtype. That of stacked experts is on the CPU.
    """
    if weight.ndim == 3:
        module = model.get_submodule(name.rpartition(".")[0])
        return experts.merged(module, weight, pair.a, pair.b, scaling)
    return torch.addmm(weight.float(), pair.b, pair.a, alpha=scaling).to(weight.dtype)


def unwrapped_name(model: nn.Module, parameter: str) -> str:
    """The name that a parameter had before `wrap`."""
    path, _, leaf = parameter.rpartition(".")
    outer = path.rpartition(".")[0]
    return f"{outer}.{leaf}" if isinstance(model.get_submodule(outer), LoraLinear) else parameter


def targets(model: nn.Module) -> dict[str, list[str]]:
    """The paths of an adapter's pairs by group (attn, mlp, unembed), before or after `wrap`: on linears, and in the
    form of workers.models.experts on stacked experts."""
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear | LoraLinear)]
    on_experts = experts.paths(model)
    found = target_modules.groups(linears, experts=target_modules.has_experts(model) and not on_experts)
    return {**found, "mlp": found["mlp"] + on_experts}


def new_adapter(model: nn.Module, spec: LoraSpec, *, critic: bool = False) -> Adapter:
    """Returns a new adapter on the CPU, for a wrapped or bare model. It changes no output until trained, since B is
    zero. Pairs on experts are sampled last.

    A is kaiming_uniform(a=sqrt(5)), sampled on the CPU from `spec.seed` alone, so every device and rank has the same A.
    A critic has no pair on the head it does not use. Its own value head is N(0, 1/(hidden size + 1)), as in OpenRLHF:
    values start next to 0, where returns mostly are, but not at 0, since a zero head would give the adapter no
    gradient.
    """
    spec = replace(spec, train_unembed=False) if critic else spec
    generator = torch.Generator("cpu").manual_seed(spec.seed)
    pairs = {}
    for path in sorted(_chosen(model, spec), key=experts.is_pair):
        in_features, out_features, rank = _pair_shape(model, path, spec.rank)
        a = nn.init.kaiming_uniform_(torch.empty(rank, in_features), a=sqrt(5), generator=generator)
        pairs[path] = LoraPair(nn.Parameter(a), nn.Parameter(torch.zeros(out_features, rank)))
    return Adapter(spec, pairs, new_value_head(model, generator) if critic else None)


def new_value_head(model: nn.Module, generator: torch.Generator) -> nn.Parameter:
    """Returns a new value head, fp32 [1, hidden size], on the CPU; see new_adapter."""
    empty = torch.empty(1, _hidden_size(model))
    return nn.Parameter(empty.normal_(0.0, 1 / (empty.shape[1] + 1), generator=generator))


def check_fits(adapter: Adapter, model: nn.Module) -> None:
    """Raises UserOpError when the adapter's paths or shapes are not those its spec gives on this model."""
    expected = {path: _pair_shape(model, path, adapter.spec.rank) for path in _chosen(model, adapter.spec)}
    found = {path: (pair.a.shape[1], pair.b.shape[0], pair.a.shape[0]) for path, pair in adapter.pairs.items()}
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise UserOpError(
                f"the adapter does not fit this base model: {path} has (in, out, rank) {found.get(path)} in the "
                f"file and {expected.get(path)} in the model; load it on the base model it was trained on"
            )
    if adapter.value_head is not None and adapter.value_head.shape != (1, _hidden_size(model)):
        raise UserOpError(
            f"the value head has shape {list(adapter.value_head.shape)}, but this base model needs [1, "
            f"{_hidden_size(model)}]: load a critic that was trained on this base model"
        )


def check_role(adapter: Adapter, *, critic: bool) -> None:
    """Raises UserOpError unless the adapter, read from a checkpoint, is a critic's or a policy's, as `critic` asks."""
    if adapter.critic != critic:
        found, wanted = ("critic", "policy") if adapter.critic else ("policy", "critic")
        raise UserOpError(
            f"the checkpoint is of a {found}, but this model is a {wanted}: their heads differ. Load a checkpoint of "
            f"a {wanted}"
        )


def _chosen(model: nn.Module, spec: LoraSpec) -> list[str]:
    """The target paths that a spec asks for, in the model's order."""
    wanted = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    return [path for group, paths in targets(model).items() if wanted[group] for path in paths]


def shapes(model: nn.Module) -> dict[str, dict[str, Shape]]:
    """The shapes of all pairs that an adapter can have, by group and path."""
    return {group: {path: _shape(model, path) for path in paths} for group, paths in targets(model).items()}


def _pair_shape(model: nn.Module, path: str, rank: int) -> tuple[int, int, int]:
    """(in, out) features and rank (of all experts together) of a pair."""
    in_features, out_features, count = _shape(model, path)
    return in_features, out_features, count * rank


def _shape(model: nn.Module, path: str) -> Shape:
    """The shape of the tensor under a pair. ZeRO-3 empties a weight's shape, so the module's own record is used."""
    if experts.is_pair(path):
        count, in_features, out_features = experts.shape(model, path)
        return in_features, out_features, count
    module = model.get_submodule(path)
    core = module.base if isinstance(module, LoraLinear) else module
    assert isinstance(core, nn.Linear)
    return core.in_features, core.out_features, 1


def _hidden_size(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().hidden_size)

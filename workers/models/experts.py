"""LoRA on stacked experts: the adapters' products beside transformers' grouped products, for each expert's own tokens.

A pair has the layout of PEFT files, which stack the experts' pairs: `a` [experts · rank, in], expert after expert, and
`b` [out, rank · experts], where an expert has every `experts`-th column. A pair's path is PEFT's too: the wrapper
around the first tensor lies inside the second's, so `experts.base_layer` is gate_up_proj and `experts` is down_proj.

Llama 4's experts and Inkling's shared experts have a forward of their own, in which all of them run on all tokens.
Llama 4 gives an expert zeros in the place of tokens that are not its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, _grouped_linear, _grouped_mm

from workers.backends.devices import moved
from workers.models import target_modules
from workers.models.products import grouped
from workers.models.quantized import QuantizedWeight, for_product

NAME = "tinsmith_lora"
# The attribute of a module that keeps some of its experts: a range.
_KEPT = "kept_experts"
_WRAPPER = ".base_layer"
# The names of stacked tensors, in their modules' order, and how many of PEFT's wrappers lie around a tensor's own.
_OUTER = {"gate_proj": 2, "gate_up_proj": 1, "up_proj": 1, "down_proj": 0}
_MODULES = ("experts", "shared_experts")
_PAIR = re.compile(rf"\.({'|'.join(_MODULES)})({re.escape(_WRAPPER)})*$")
SegmentsInUse = Callable[[], Sequence[tuple[Any, int]]]
"""Returns the segments of a forward, see workers.models.lora.use."""


def found(model: nn.Module) -> dict[str, nn.Module]:
    """The stacked experts that adapters can sit on, by module path, in the model's order."""
    return {
        path: module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in _MODULES and target_modules.in_language_model(path) and names(module)
    }


def names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's stacked tensors, in the module's order; none where adapters cannot sit on them."""
    stacked = (nn.Parameter, QuantizedWeight)
    own = tuple(name for name in _OUTER if isinstance(getattr(module, name, None), stacked))
    complete = len(own) > 1 and [_OUTER[name] for name in own] == [*reversed(range(len(own)))]
    known = hasattr(module, "_apply_gate") or type(module).__name__ in _FORWARDS
    return own if complete and known else ()


def paths(model: nn.Module) -> list[str]:
    """The paths of the pairs on experts, in the model's order."""
    return [path + _WRAPPER * _OUTER[name] for path, module in found(model).items() for name in names(module)]


def is_pair(path: str) -> bool:
    """True for the path of a pair on experts."""
    return _PAIR.search(path) is not None


def target_parameters(model: nn.Module) -> list[str]:
    """The tensors as PEFT's `target_parameters` names them."""
    named = ((path.rpartition(".")[2], names(module)) for path, module in found(model).items())
    return list(dict.fromkeys(f"{leaf}.{name}" for leaf, own in named for name in own))


def pair_path(parameter: str) -> str:
    """The path of the pair on a parameter, by the parameter's name."""
    module, _, name = parameter.rpartition(".")
    is_stacked = name in _OUTER and module.rpartition(".")[2] in _MODULES
    return module + _WRAPPER * _OUTER[name] if is_stacked else parameter.removesuffix(".weight")


def module_path(path: str) -> str:
    """The path of the module under a pair, on a linear or on experts."""
    return path.replace(_WRAPPER, "")


def shape(model: nn.Module, path: str) -> tuple[int, int, int]:
    """(experts, in, out) of the tensor under a pair, of which this rank may keep some experts alone. ZeRO-3 empties the
    tensor's shape, so its record is used."""
    outer = path.count(_WRAPPER)
    module: Any = model.get_submodule(module_path(path))
    weight = getattr(module, next(name for name in names(module) if _OUTER[name] == outer))
    count, rows, columns = getattr(weight, "ds_shape", weight.shape)
    count = module.num_experts if hasattr(module, _KEPT) else count
    return (count, rows, columns) if _is_transposed(module) else (count, columns, rows)


def _is_transposed(module: nn.Module) -> bool:
    """True if PEFT takes the module's tensors for [experts, in, out]. PEFT 0.21 does not where they are Llama 4's."""
    return getattr(module, "is_transposed", False)


def merged(module: Any, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The module's stacked tensor [experts, out, in], or transposed [experts, in, out], plus scaling · B A, on the CPU.

    Computed in fp32 and rounded once. A GPU full of weights has room for this on one expert, but not on all at once.
    """
    found = torch.empty_like(weight, device="cpu")
    stacked_a, stacked_b = _stacked(a, b, len(weight))
    for expert, own in enumerate(weight):
        added = stacked_b[expert] @ stacked_a[expert]
        found[expert] = (own.float() + scaling * (added.mT if _is_transposed(module) else added)).to(weight.dtype)
    return found


def can_keep_some(module: Any) -> bool:
    """True if `keep` can take some of the module's experts: others' forward knows no missing expert."""
    return hasattr(module, "_apply_gate") and not module.has_bias


def keep(module: Any, own: range) -> None:
    """Says that the module's tensors are those of the experts `own` alone. From then on it gives the part of its sum
    that is theirs."""
    setattr(module, _KEPT, own)


def part(a: Tensor, b: Tensor, count: int, own: range) -> tuple[Tensor, Tensor]:
    """The part of a pair on `count` experts that is for the experts `own`, laid out as the pair itself."""
    rank = len(a) // count
    of_b = b.view(len(b), -1, count)[..., own.start : own.stop]
    return a[own.start * rank : own.stop * rank], of_b.flatten(1)


def wrap(model: Any, segments_in_use: SegmentsInUse) -> None:
    """Makes the model's experts add the products of the adapters that `segments_in_use` returns."""

    def forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return _routed(module, hidden, chosen, weights, segments_in_use())

    ExpertsInterface.register(NAME, forward)
    modules = found(model)
    for path, module in modules.items():
        module.lora_path = path  # type: ignore[assignment]
        if own := _FORWARDS.get(type(module).__name__):
            module.forward = partial(own, module, segments_in_use)
    if any(hasattr(module, "_apply_gate") for module in modules.values()):
        model.set_experts_implementation(NAME)


def _routed(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, segments: Sequence[Any]) -> Tensor:
    """Maps hidden states [tokens, width] to the experts' weighted sum, as transformers' grouped_mm does."""
    rows = _Rows(module, segments, hidden, chosen)
    x = rows.kept(rows.gathered(hidden))
    for name in names(module):
        bias = getattr(module, f"{name}_bias")[rows.experts] if module.has_bias else None
        with for_product(getattr(module, name)) as weight:
            out = _grouped_linear(x, weight, rows.expert_ends, bias, module.is_transposed)
        out = rows.add(x, out, module.lora_path + _WRAPPER * _OUTER[name])
        x = out if name == "down_proj" else module._apply_gate(out) if module.has_gate else module.act_fn(out)
    return rows.combined(rows.kept(x), weights).to(hidden.dtype)


def _llama4(module: Any, segments_in_use: SegmentsInUse, hidden: Tensor) -> Tensor:
    """Maps [experts · tokens, width], expert after expert, to the same, as transformers' Llama4TextExperts does."""
    x = hidden.view(module.num_experts, -1, hidden.shape[-1])
    gate, up = _dense(module, "gate_up_proj", x, segments_in_use(), as_stored=True).chunk(2, dim=-1)
    return _dense(module, "down_proj", up * module.act_fn(gate), segments_in_use(), as_stored=True).view(hidden.shape)


def _inkling_shared(module: Any, segments_in_use: SegmentsInUse, hidden: Tensor, gammas: Tensor) -> Tensor:
    """Maps hidden states [rows, tokens, width] to the experts' sum, weighted by gammas [rows · tokens, experts], as
    transformers' InklingSharedExperts does."""
    count, segments = module.n_shared_experts, segments_in_use()
    x = hidden.reshape(1, -1, hidden.shape[-1]).expand(count, -1, -1)
    gate, up = (_dense(module, name, x, segments) for name in ("gate_proj", "up_proj"))
    activated = module.act_fn(gate) * up * gammas.reshape(-1, count, 1).transpose(0, 1)
    down = _dense(module, "down_proj", activated, segments)
    return down.float().sum(dim=0).to(hidden.dtype).view(hidden.shape)


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {"Llama4TextExperts": _llama4, "InklingSharedExperts": _inkling_shared}


def _dense(module: Any, name: str, x: Tensor, segments: Sequence[Any], *, as_stored: bool = False) -> Tensor:
    """Maps x [experts, tokens, in] to [experts, tokens, out], each expert with its own weight and pair.

    `as_stored`: the weight is [experts, in, out]. PEFT does not know, so A has the output's width and B the input's.
    """
    with for_product(getattr(module, name)) as weight:
        out = torch.bmm(x, weight if as_stored else weight.mT)
    path = module.lora_path + _WRAPPER * _OUTER[name]
    if not any(adapter is not None and path in adapter.pairs for adapter, _ in segments):
        return out
    parts, start, unit = [], 0, x.shape[1] // max(1, sum(share for _, share in segments))
    for adapter, share in segments:
        rows = slice(start, start + share * unit)
        start = rows.stop
        part = out[:, rows]
        if adapter is not None and path in adapter.pairs:
            pair = adapter.pairs[path]
            a, b = (one.to(x.dtype) for one in _stacked(pair.a, pair.b, len(x)))
            first, second = (b, a) if as_stored else (a.mT, b.mT)
            part = torch.baddbmm(part, torch.bmm(x[:, rows], first), second, alpha=adapter.scaling)
        parts.append(part)
    return torch.cat(parts, 1)


class _Rows:
    """A row for each choice (a token and one of its experts), by expert and then by adapter.

    tokens, experts, kinds: [rows], each row's token, expert and adapter's number. ends: [experts · adapters] and
    expert_ends: [experts], where their rows end. places: [tokens, choices of a token], each choice's row.

    Where the module keeps some of its experts, the rows of all others come last, and no product computes them. On a
    CPU, rows in bf16 are spread out to groups of a rounded size (see _rounded): no choice refers to the spare rows.
    """

    def __init__(self, module: Any, segments: Sequence[Any], hidden: Tensor, chosen: Tensor) -> None:
        path = module.lora_path
        owners = [adapter if adapter is not None and path in adapter.pairs else None for adapter, _ in segments]
        self.adapters = list(dict.fromkeys(owners)) or [None]
        kinds, device = len(self.adapters), chosen.device
        own: range | None = getattr(module, _KEPT, None)
        computed = kinds * (module.num_experts if own is None else len(own))
        shares = [share for _, share in segments]
        group, choices = torch.sort(self._groups(chosen.reshape(-1), own, owners, shares), stable=True)
        # In the place of torch.bincount, for which the host waits.
        count = computed if own is None else computed + kinds
        ends = torch.searchsorted(group, torch.arange(count, device=device), right=True)
        rows = torch.arange(len(group), device=device)
        tokens = choices // chosen.shape[1]
        unused: Tensor | None = None
        if hidden.dtype == torch.bfloat16 and device.type == "cpu":
            counts = ends.diff(prepend=ends.new_zeros(1))
            sizes = _rounded(counts)
            spare = sizes - counts
            rows = rows + (spare.cumsum(0) - spare)[group]
            tokens = tokens.new_zeros(int(sizes.sum())).index_copy(0, rows, tokens)
            unused = torch.ones_like(tokens, dtype=torch.bool).index_fill(0, rows, False)
            group = torch.arange(len(sizes)).repeat_interleave(sizes)
            ends = sizes.cumsum(0)
        self.tokens, self.places = tokens, torch.empty_like(choices).index_copy(0, choices, rows).view_as(chosen)
        self.experts, self.kinds = group // kinds, group % kinds
        if own is not None:
            others = group >= computed
            unused = others if unused is None else others | unused
        self._unused = unused
        self.ends = ends[:computed].to(torch.int32)
        self.expert_ends = self.ends[kinds - 1 :: kinds].contiguous()

    def _groups(self, chosen: Tensor, own: range | None, owners: Sequence[Any], shares: Sequence[int]) -> Tensor:
        """Returns the group of each choice [choices]: by expert, the module's own ones first, and then by adapter.

        `owners`: the adapter of each segment; `shares`: the segments' tokens, or rows of equally many tokens.
        """
        if own is not None:
            chosen = torch.where((chosen >= own.start) & (chosen < own.stop), chosen - own.start, len(own))
        if len(self.adapters) == 1:
            return chosen
        unit = len(chosen) // sum(shares)
        counts = moved(torch.tensor([share * unit for share in shares]), chosen.device)
        numbers = moved(torch.tensor([self.adapters.index(owner) for owner in owners]), chosen.device)
        return chosen * len(self.adapters) + numbers.repeat_interleave(counts, output_size=len(chosen))

    def gathered(self, hidden: Tensor) -> Tensor:
        """Maps [tokens, width] to [rows, width]."""
        gathered: Tensor = _Gather.apply(hidden, self.tokens, self.places)  # type: ignore[no-untyped-call]
        return gathered

    def kept(self, x: Tensor) -> Tensor:
        """Maps [rows, width] to the same with zeros in the rows that no product computes, which hold anything, and in
        spare rows: a value of another tenant's token that is not finite would spoil the group's gradient."""
        return x if self._unused is None else x.masked_fill(self._unused[:, None], 0)

    def combined(self, x: Tensor, weights: Tensor) -> Tensor:
        """Maps [rows, width] to the tokens' sums [tokens, width], with the choices' weights [tokens, choices]."""
        dtype = torch.result_type(x, weights)
        combined: Tensor = _Combine.apply(x.to(dtype), weights.to(dtype), self.tokens, self.places)  # type: ignore[no-untyped-call]
        return combined

    def add(self, x: Tensor, out: Tensor, path: str) -> Tensor:
        """Adds scaling · x Aᵀ Bᵀ of each row's expert and adapter to `out`."""
        if self.adapters == [None]:
            return out
        rank = grouped.aligned(max(adapter.spec.rank for adapter in self.adapters if adapter is not None))
        count = len(self.expert_ends)
        # the pair of rows without an adapter
        nothing = x.new_zeros(count, rank, x.shape[1]), x.new_zeros(count, out.shape[1], rank)
        pairs = [nothing if adapter is None else _padded(adapter.pairs[path], count, rank) for adapter in self.adapters]
        a, b = (torch.stack(parts, 1).flatten(0, 1).to(x.dtype) for parts in zip(*pairs, strict=True))
        scalings = moved(torch.tensor([0.0 if one is None else one.scaling for one in self.adapters]), x.device)
        low = _product(x, a.mT, self.ends) * scalings.to(x.dtype)[self.kinds, None]
        return out.add_(_product(low, b.mT, self.ends))


class _Gather(torch.autograd.Function):
    """Each row's token. Autograd would add up the gradient row by row, on one thread."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return hidden.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return nn.functional.embedding_bag(places, grads[0].contiguous(), mode="sum"), None, None


class _Combine(torch.autograd.Function):
    """Each token's weighted sum of its rows, in one pass over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, tokens, places)
        return nn.functional.embedding_bag(places, x, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = grads
        x, weights, tokens, places = ctx.saved_tensors
        of_rows = weights.new_zeros(len(x)).index_copy(0, places.flatten(), weights.flatten())
        of_weights = torch.bmm(x[places.flatten()].view(*places.shape, -1), gradient[:, :, None])[..., 0]
        return gradient.index_select(0, tokens) * of_rows[:, None], of_weights, None, None


def _product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each group's rows of x [T, in] by the group's own [in, out], of [groups, in, out].

    More groups than one product takes are several products over all rows. In each of them, zeros stand for the groups
    before and after its own. Their sum has the bits of one product, and the host does not wait for a group's end.
    """
    if len(ends) <= grouped.MOST_GROUPS:
        return _grouped_mm(x, weights, ends)  # type: ignore[no-any-return]
    most = grouped.MOST_GROUPS - 2
    parts = torch.split(ends, most)
    starts = [ends.new_zeros(1), *(part[-1:] for part in parts[:-1])]
    between_zeros = (
        nn.functional.pad(own.mT, (0, 0, 0, 0, 1, 1)).mT  # in the layout of `weights`
        for own in torch.split(weights, most)
    )
    products: Iterator[Tensor] = (
        _grouped_mm(x, padded, torch.cat([start, part, ends[-1:]]))
        for padded, start, part in zip(between_zeros, starts, parts, strict=True)
    )
    return reduce(torch.add, products)


def _rounded(sizes: Tensor) -> Tensor:
    """The sizes, rounded up to four significant binary digits.

    oneDNN compiles a product for each new number of rows, and keeps 1,024 of them. Without rounding each pass, whose
    routing is new, spends most of its time on that.
    """
    step = 2 ** (torch.frexp(sizes.float()).exponent - 4).clamp(min=0)
    return (sizes + step - 1) // step * step


def _padded(pair: Any, count: int, rank: int) -> tuple[Tensor, Tensor]:
    """A [experts, rank, in] and B [experts, out, rank], with zeros up to `rank`."""
    a, b = _stacked(pair.a, pair.b, count)
    missing = rank - a.shape[1]
    return nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))


def _stacked(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A [experts, rank, in] and B [experts, out, rank] of a pair."""
    return a.view(count, -1, a.shape[1]), b.view(len(b), -1, count).permute(2, 0, 1)

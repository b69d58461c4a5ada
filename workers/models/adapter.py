"""A LoRA adapter: its parameters, and where they lie in one flat tensor.

The flat tensor lets a kernel, or a call from the host, take all parameters: 16 adapters of Qwen3-0.6B have 6,272
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from app.domain.adapters import KEY_PREFIX
from app.domain.ops import LoraSpec
from workers.models import experts

SCORE = "score"
"""The name that transformers gives to the head of a sequence classifier. PEFT keeps this head beside the adapter, under
the same name."""
SCORE_KEY = f"{KEY_PREFIX}{SCORE}.weight"
Segments = Sequence[tuple["Adapter | None", int]]
"""Consecutive rows of a pass by adapter: (adapter, number of rows). None is the base alone."""
# Linears of one module that read the same input.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# In the flat tensor each matrix begins at a multiple of 64 elements. torch aligns its own tensors too, and the results
# of some kernels depend on it.
_ALIGNMENT = 64
# Each rank of a trainer owns some of the pieces. The pieces do not depend on the ranks, so a norm has the same bits.
_PIECES = 16


class Layout:
    """Where matrices lie in a flat tensor. `length`: its elements; those between the matrices are zero."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes`: those of the matrices, in the order in which they lie."""
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        sizes = [prod(shape) for shape in shapes.values()]
        *self._starts, self.length = accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0)

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the matrices by their names; they are views of `flat` [length], which is not a view itself."""
        found = {}
        for (name, (rows, columns)), start in zip(self._shapes.items(), self._starts, strict=True):
            found[name] = flat.as_strided((rows, columns), (columns, 1), start)  # a third of the time of a slice's view
        return found

    @torch.no_grad()
    def joined(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Copies matrices into a flat one, cast on `device`, where each is in memory twice only while it is copied.

        Raises KeyError when one is missing, RuntimeError when one has another number of elements.
        """
        flat = torch.zeros(self.length, device=device, dtype=dtype)
        for name, part in self.parts(flat).items():
            part.copy_(tensors[name].view(part.shape).to(device))
        return flat


def pieces(flat: Tensor) -> dict[str, Tensor]:
    """Returns up to 16 consecutive pieces of a flat tensor by their numbers, [n, 64] each; they are views."""
    return {str(number): piece for number, piece in enumerate(torch.chunk(flat.view(-1, _ALIGNMENT), _PIECES))}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One linear's part of an adapter, fp32: `a` [rank, in_features], `b` [out_features, rank]."""

    a: nn.Parameter
    b: nn.Parameter


@dataclass(frozen=True, eq=False)
class Adapter:
    """Adds `scaling * x Aᵀ Bᵀ` to the output of every linear in `pairs`, which is keyed by module path.

    A critic's `value_head`, fp32 [1, hidden size], gives the value of each token from its last hidden state.

    `flat`: the tensor of which all parameters are parts, if there is one (see `packed`). `row`: its first part, if that
    lies as a row of grouped.stacked. A pass leaves gradients in the `.grad` of `row` and of the parameters.
    """

    spec: LoraSpec
    pairs: dict[str, LoraPair]
    value_head: nn.Parameter | None = None
    flat: nn.Parameter | None = None
    row: nn.Parameter | None = None

    @property
    def critic(self) -> bool:
        return self.value_head is not None

    @property
    def whole(self) -> nn.Parameter:
        """`flat` of a packed adapter."""
        assert self.flat is not None
        return self.flat

    @property
    def scaling(self) -> float:
        return self.spec.alpha / self.spec.rank

    @cached_property
    def tensors(self) -> Mapping[str, nn.Parameter]:
        """Every parameter by its name in a PEFT file, sorted by path, and the value head last."""
        found = {
            _name(path, part): parameter
            for path, pair in sorted(self.pairs.items())
            for part, parameter in (("A", pair.a), ("B", pair.b))
        }
        return found if self.value_head is None else {**found, SCORE_KEY: self.value_head}

    @cached_property
    def linears(self) -> Sequence[str]:
        """The paths of the pairs on linears. Those that read the same input are neighbours."""
        return [path for group in together(self.pairs) for path in group]

    @cached_property
    def layout(self) -> Layout:
        """Where the tensors lie in `flat`: A of all linears, then B, and then all others."""
        names = [_name(path, part) for part in "AB" for path in self.linears]
        return Layout({name: self.tensors[name].shape for name in dict.fromkeys([*names, *self.tensors])})

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Moves the `.grad` of `row` and of all parameters to that of `flat`, and returns it: fp32, zero where there is
        none."""
        if self.whole.grad is None:
            self.whole.grad = torch.zeros_like(self.whole)
        if self.row is not None and self.row.grad is not None:
            self.whole.grad[: len(self.row)].add_(self.row.grad)
            self.row.grad = None
        found = {name: p.grad for name, p in self.tensors.items() if p.grad is not None}
        if found:
            parts = self.layout.parts(self.whole.grad)
            torch._foreach_add_([parts[name] for name in found], [*found.values()])
            for parameter in self.tensors.values():
                parameter.grad = None
        return self.whole.grad

    def drop_gradients(self) -> None:
        """Removes the `.grad` of every parameter, of `flat` and of `row`."""
        for parameter in (*self.tensors.values(), self.flat, self.row):
            if parameter is not None:
                parameter.grad = None

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Adapter:
        """A copy on `device`, packed."""
        return self.packed(self.layout.joined(self.tensors, device, dtype))

    def packed(self, flat: Tensor) -> Adapter:
        """An adapter of this kind whose tensors are the parts of `flat`."""
        values = {name: nn.Parameter(part) for name, part in self.layout.parts(flat).items()}
        pairs = {path: LoraPair(values[_name(path, "A")], values[_name(path, "B")]) for path in self.pairs}
        row = nn.Parameter(flat[: self._width]) if self._width else None
        return Adapter(self.spec, pairs, values.get(SCORE_KEY), nn.Parameter(flat), row)

    def follow(self) -> None:
        """Makes the parameters parts of `flat` again, whose data was replaced."""
        for name, part in self.layout.parts(self.whole.data).items():
            self.tensors[name].data = part
        if self.row is not None:
            self.row.data = self.whole.data[: len(self.row)]

    @cached_property
    def _width(self) -> int:
        """The elements of the tensors on linears, 0 if there are gaps between them in `flat`."""
        sizes = [self.tensors[_name(path, part)].numel() for path in self.linears for part in "AB"]
        return 0 if any(size % _ALIGNMENT for size in sizes) else sum(sizes)


def _name(path: str, part: str) -> str:
    return f"{KEY_PREFIX}{path}.lora_{part}.weight"


def together(paths: Iterable[str]) -> list[list[str]]:
    """Groups the paths of linears that read the same input; the order is always the same."""
    groups: dict[tuple[str, object], list[str]] = {}
    for path in sorted(path for path in {*paths} if not experts.is_pair(path)):
        parent, _, name = path.rpartition(".")
        kind = next((names for names in _TOGETHER if name in names), name)
        groups.setdefault((parent, kind), []).append(path)
    return [*groups.values()]

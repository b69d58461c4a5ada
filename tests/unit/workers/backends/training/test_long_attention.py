"""Attention over long datums: the textbook formula's values and gradients, the old bits, and no [tokens, tokens]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workers.backends.training import attention
from workers.backends.training.attention import _fused, _plain, packed_attention
from workers.backends.training.packing import runs_of

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCALING = 0.3
KINDS = [(3, None), (30, None), (None, 1.5), (3, 1.5)]
"""(window, softcap)."""


def tensors(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def trained(attention: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of a random linear loss."""
    out = attention(*leaves)
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)).sum()
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def packed(lengths: list[int], window: int | None, softcap: float | None) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        settings: dict[str, Any] = {"scaling": SCALING, "sliding_window": window, "softcap": softcap}
        return packed_attention(nn.Module(), q, k, v, None, runs=runs_of(lengths), **settings)[0].transpose(1, 2)

    return attention


@pytest.mark.parametrize(("window", "softcap"), KINDS)
def test_blocks_of_queries_equal_the_whole_formula(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None
) -> None:
    for name, value in {"_KEPT_UP_TO": 4, "_WHOLE_UP_TO": 20, "_LEAST_ROWS": 2, "_MOST_ROWS": 7}.items():
        monkeypatch.setattr(attention, name, value)
    leaves = tensors(40)
    found = trained(packed([40], window, softcap), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = trained(partial(_plain, scaling=SCALING, window=window, softcap=softcap, sinks=None), exact)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize(("window", "softcap"), KINDS)
def test_datums_of_lengths_that_were_trained_before_keep_their_bits(window: int | None, softcap: float | None) -> None:
    leaves = tensors(600)
    before = partial(_fused, scaling=SCALING, window=window)
    if softcap is not None:
        before = partial(_plain, scaling=SCALING, window=window, softcap=softcap, sinks=None)
    found = trained(packed([600], window, softcap), leaves)
    assert all(map(torch.equal, found, trained(before, leaves)))


@pytest.mark.parametrize(("window", "softcap"), KINDS)
def test_no_tensor_of_a_long_datum_grows_with_the_square_of_its_length(
    window: int | None, softcap: float | None
) -> None:
    with Largest() as largest:
        trained(packed([5000], window, softcap), tensors(5000))
    assert largest.elements <= attention._MOST_ROWS * HEADS * 5000 / 2


def test_narrower_values_keep_no_scores_either() -> None:
    query, key, value = tensors(5000)
    with Largest() as largest:
        trained(packed([5000], None, None), [query, key, value[..., : WIDTH // 2].detach().requires_grad_()])
    assert largest.elements == query.numel()


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return found

"""Attention on a GPU: datums of one length, which have a call of their own, beside all datums in one call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.backends.training import attention
from workers.backends.training.packing import Run, runs_of


def _attended(runs: list[Run], tokens: int) -> list[Tensor]:
    """The attention of random bf16 heads, and the gradients in query, key and value."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 64, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (8, 2, 2)
    )
    seen, _ = attention.packed_attention(torch.nn.Module(), q, k, v, None, runs=runs, scaling=0.125)
    seen.square().sum().backward()
    return [seen.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]


@pytest.mark.parametrize("lengths", [[2048], [4100], [700] * 4, [3001, 2048, 2048]], ids=str)
def test_a_call_for_each_length_equals_one_for_all(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = _attended(runs_of(lengths), sum(lengths))
    monkeypatch.setattr(attention, "_OWN_CALL", sum(lengths) + 1)
    for one, other in zip(found, _attended(runs_of(lengths), sum(lengths)), strict=True):
        assert (one - other).float().norm() < 0.01 * other.float().norm()


@pytest.mark.parametrize("window", [None, 100])
def test_sinks_of_datums_of_any_lengths_equal_the_formula_in_fp32(window: int | None) -> None:
    """The output in one call, and the gradients in query, key, value and sinks."""
    lengths = [300, 17, 600, 1, 300]
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (8, 2, 2)] + [(8,)]
    given = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    found = []
    for leaves in ([tensor.float().requires_grad_() for tensor in given], [one.requires_grad_() for one in given]):
        seen, _ = attention.packed_attention(
            torch.nn.Module(),
            *leaves[:3],
            None,
            runs=runs_of(lengths),
            scaling=0.125,
            sliding_window=window,
            s_aux=leaves[3],
        )
        found.append([seen.detach(), *torch.autograd.grad(seen.square().sum(), leaves)])
    for exact, one in zip(*found, strict=True):
        assert (one.float() - exact).norm() < 0.01 * exact.norm()

"""Packed attention against the textbook formula in fp64, one datum and one head at a time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from workers.backends.training.attention import packed_attention
from workers.backends.training.packing import runs_of

HEADS, KV_HEADS, WIDTH = 6, 2, 16
SCALING = 0.3
LENGTHS = (5, 5, 1, 12)


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(query.shape[2], HEADS, value.shape[3], dtype=torch.float64)
    start = 0
    for length in lengths:
        for head in range(HEADS):
            q = query[0, head, start : start + length].double()
            k, v = (tensor[0, head // 3, start : start + length].double() for tensor in (key, value))
            for i in range(length):
                first = 0 if window is None else max(0, i - window + 1)
                scores = k[first : i + 1] @ q[i] * SCALING
                scores = scores if bias is None else scores + bias[head, i, first : i + 1]
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                shares = scores.exp()
                total = shares.sum() + (0 if sinks is None else sinks[head].double().exp())
                out[start + i, head] = shares / total @ v[first : i + 1]
        start += length
    return out


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, sum(LENGTHS), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).transpose(1, 2).to(dtype) for shape in shapes]


def attend(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """[T, heads, E] of one row."""
    return packed_attention(nn.Module(), query, key, value, None, runs=runs_of(LENGTHS), scaling=SCALING, **settings)[
        0
    ][0]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_token_sees_its_own_datums_past_alone(
    window: int | None, softcap: float | None, dtype: torch.dtype, bound: float
) -> None:
    query, key, value = tensors(0, dtype)
    found = attend(query, key, value, sliding_window=window, softcap=softcap)
    wanted = by_hand(query, key, value, LENGTHS, window, softcap)
    assert found.dtype is dtype
    assert (found.double() - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_its_share_of_the_attention(window: int | None) -> None:
    query, key, value = tensors(0)
    sinks = torch.linspace(-1, 2, HEADS)
    found = attend(query, key, value, sliding_window=window, s_aux=sinks)
    torch.testing.assert_close(found, by_hand(query, key, value, LENGTHS, window, None, sinks).float())


@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_is_added_to_the_scores_of_datums_that_are_rows_of_their_own(window: int | None) -> None:
    query, key, value = tensors(0)
    length = sum(LENGTHS)
    bias = torch.randn(2, HEADS, length, length, generator=torch.Generator().manual_seed(1))
    rows = (torch.cat([tensor, tensor]) for tensor in (query, key, value))
    found, _ = packed_attention(
        nn.Module(), *rows, None, runs=[(1, length)], scaling=SCALING, sliding_window=window, position_bias=bias
    )
    for row, own in zip(found, bias, strict=True):
        torch.testing.assert_close(row, by_hand(query, key, value, [length], window, None, bias=own).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_have_another_width_than_keys(dtype: torch.dtype) -> None:
    query, key, value = tensors(0, dtype)
    found = attend(query, key, value[..., :5]).double()
    wanted = by_hand(query, key, value[..., :5], LENGTHS, None, None)
    assert (found - wanted).norm() < (1e-6 if dtype is torch.float32 else 2e-2) * wanted.norm()


def test_each_row_of_a_batch_has_the_same_runs() -> None:
    query, key, value = (torch.cat(pair) for pair in zip(tensors(0), tensors(1), strict=True))
    found, _ = packed_attention(nn.Module(), query, key, value, None, runs=runs_of(LENGTHS), scaling=SCALING)
    for row, seed in zip(found, (0, 1), strict=True):
        torch.testing.assert_close(row, attend(*tensors(seed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_datum_gives_no_gradient_to_another(dtype: torch.dtype) -> None:
    leaves = [tensor.requires_grad_() for tensor in tensors(0, dtype)]
    attend(*leaves)[:5].sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad[:, :, :5].any()
        assert not leaf.grad[:, :, 5:].any()


def test_an_argument_that_may_change_the_result_is_never_swallowed() -> None:
    """transformers hands each family's own arguments over by name."""
    kinds = {parameter.kind for parameter in inspect.signature(packed_attention).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    with pytest.raises(TypeError, match="score_mod"):
        packed_attention(nn.Module(), *tensors(0), None, runs=runs_of(LENGTHS), scaling=SCALING, score_mod=1)
    with pytest.raises(TypeError, match="mask"):
        packed_attention(nn.Module(), *tensors(0), torch.zeros(1), runs=runs_of(LENGTHS), scaling=SCALING)


def test_torch_has_the_operator_that_sinks_need_on_a_gpu() -> None:
    """Without public forms: the backward pass of varlen_attn with another lse, and lse with heads before tokens."""
    taken = [(one.name, str(one.type)) for one in torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments]
    assert [name for name, _ in taken[:6]] == ["grad_out", "query", "key", "value", "out", "lse"]
    assert taken[6:] == [
        ("cu_seq_q", "Tensor"),
        ("cu_seq_k", "Tensor"),
        ("max_q", "int"),
        ("max_k", "int"),
        ("is_causal", "bool"),
        ("rng_state", "Tensor"),
        ("scale", "Optional[float]"),
        ("window_size", "Optional[List[int]]"),
    ]
    query, ends = torch.empty(23, HEADS, WIDTH, device="meta"), torch.empty(5, dtype=torch.int32, device="meta")
    _, lse = varlen_attn(query, query, query, ends, ends, 12, 12, return_aux=AuxRequest(lse=True))
    assert lse.shape == (HEADS, 23)
    assert lse.dtype is torch.float32

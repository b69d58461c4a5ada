"""Attention over datums that lie end to end in one row.

transformers calls it in place of its own attention (`NAME` is registered with it). `runs` reaches it as a keyword
argument of the model's forward. transformers makes no mask for a name that it does not know.

A GPU runs all datums in one call, or long ones in a call for each length. Elsewhere, and with a cap, neighbours of one
length run together. Attention that needs a score for each query and key (a window, a cap, sinks) then takes memory that
grows with the datum: autograd keeps query, key and value, and the backward pass computes the scores again. Beyond
`_WHOLE_UP_TO` tokens the queries are also cut into blocks, so that there is never a [tokens, tokens] tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from workers.backends.devices import moved
from workers.backends.training.packing import Run

NAME = "tinsmith_packed"
# In bf16 torch's CPU kernel takes 1.7 (512 tokens) to 6 times (64) as long as the plain formula, forward and backward.
# Beyond this length the [tokens, tokens] scores that the formula keeps cost more.
_PLAIN_UP_TO = 512
# Tokens of a datum up to which scores are kept: there they are smaller than a layer's other activations.
_KEPT_UP_TO = 512
_WHOLE_UP_TO = 4096
# Scores computed at once: 16 MB in fp32. A block needs some six tensors of this size.
_SCORES = 2**22
_LEAST_ROWS, _MOST_ROWS = 64, 512
# A GPU gives datums of this length and more a call for each length, in 16 bits. cuDNN computes it in 0.53 to 0.59 of
# the time of one call for all (H100, 32 heads and 8 key heads of 128 numbers, 2,048 to 32,768 tokens, forward and
# backward).
_OWN_CALL = 2048
# cuDNN plans each length that it has not seen, so these are rounded up. At most an eighth is added.
_STEP = 256
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
# torch 2.11 has no such option: it groups heads without being asked.
_grouping = partial(varlen_attn, enable_gqa=True) if "enable_gqa" in signature(varlen_attn).parameters else varlen_attn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps query [N, heads, rows, D], key and value [N, kv heads, columns, D] to [N, heads, rows, D]. The last row is the
token of the last column."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    runs: Sequence[Run],
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, None]:
    """Maps query [B, heads, T, D], key [B, kv heads, T, D] and value [B, kv heads, T, E] to [B, T, heads, E].

    The runs add up to T, in every row alike. `s_aux`, [heads]: a further score in each softmax, whose share goes to no
    token (gpt-oss). `position_bias`, [B, heads, T, T]: is added to the scores of rows that are one datum (Inkling).
    `indices`, [B, T, k]: the tokens that each may see at most, in rows that are one datum, where the mask is causal
    (DeepSeek-V3.2). The last three arguments change nothing here: there is no dropout and no cache, and positions are
    in query and key. Any other argument, or mask, may change the result: it is a TypeError.
    """
    if indices is not None:
        return _indexed(query, key, value, indices, scaling), None
    if attention_mask is not None:
        raise TypeError(f"{type(module).__name__} passes its own attention mask, which does not separate packed datums")
    if position_bias is not None:
        assert list(runs) == [(1, query.shape[2])], "a bias between datums"
        alone = _plain(query, key, value, scaling=scaling, window=sliding_window, bias=position_bias)
        return alone.transpose(1, 2), None
    width = value.shape[-1]
    if width < query.shape[-1]:
        # torch's fused kernels need heads of one width (DeepSeek-V3 has 192 and 128). Without them all scores are kept.
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    all_long = sliding_window is None and all(length >= _OWN_CALL for _, length in runs)
    if softcap is None and (s_aux is not None or not all_long) and _in_one_call(query, value):
        return _varlen(query, key, value, runs, s_aux, scaling=scaling, window=sliding_window)[..., :width], None
    cut = zip(*(_cut(tensor, runs) for tensor in (query, key, value)), strict=True)
    parts = [_attend(q, k, v, scaling, sliding_window, softcap, s_aux).transpose(1, 2) for q, k, v in cut]
    rows = [part.reshape(len(query), -1, *part.shape[2:])[..., :width] for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1), None


AttentionInterface.register(NAME, packed_attention)


def _indexed(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scaling: float) -> Tensor:
    """Attends to the tokens of `indices` alone, up to each token's own place."""
    chosen = torch.zeros(len(query), *query.shape[2:3] * 2, dtype=torch.bool, device=query.device)
    mask = chosen.scatter_(-1, indices.long(), True).tril_()[:, None]
    seen = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return seen.transpose(1, 2)


def _in_one_call(query: Tensor, value: Tensor) -> bool:
    """True where torch's kernel for datums of any lengths runs: on a GPU, in 16 bits, with heads of 8, 16, ... 256
    numbers, values' as long as keys'."""
    width = query.shape[-1]
    fits = (
        len(query) == 1 and query.dtype.itemsize == 2 and width == value.shape[-1] and width <= 256 and width % 8 == 0
    )
    return fits and _has_flash_attention(query.device)


@cache
def _has_flash_attention(device: torch.device) -> bool:
    return device.type != "cpu" and torch.get_device_module(device).get_device_capability(device) >= (8, 0)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[Run],
    sinks: Tensor | None,
    *,
    scaling: float,
    window: int | None,
) -> Tensor:
    """The attention of all datums in one call: [1, T, heads, E]."""
    ends, longest = _ends(tuple(runs), query.device)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    seen = (-1 if window is None else window - 1, 0)
    if sinks is None:
        attended = _grouping(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=seen)
    else:
        attended = _VarlenWithSinks.apply(q, k, v, sinks, ends, longest, scaling, seen)  # type: ignore[no-untyped-call]
    assert isinstance(attended, Tensor)
    return attended[None]


class _VarlenWithSinks(torch.autograd.Function):
    """varlen_attn with a further score in the softmax of each head, the sink.

    varlen_attn also returns lse, the logarithm of each softmax's sum. With the sink in the sum it is
    lse' = log(exp(lse) + exp(sink)), and the output is exp(lse - lse') times varlen_attn's. The backward pass of
    varlen_attn computes the probabilities again, as exp(score - lse). With lse' the sink is in their sum, and the
    gradients are exact. No public function takes lse', so this calls torch's operator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        ends: Tensor,
        longest: int,
        scaling: float,
        seen: tuple[int, int],
    ) -> Tensor:
        """Maps q [T, heads, D], k and v [T, kv heads, D] and sinks [heads] to [T, heads, D]."""
        aux = AuxRequest(lse=True)
        out, lse = _grouping(q, k, v, ends, ends, longest, longest, return_aux=aux, scale=scaling, window_size=seen)
        with_sinks = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T], as lse
        out.mul_((lse - with_sinks).exp_().t()[..., None])
        ctx.save_for_backward(q, k, v, sinks, ends, out, with_sinks)
        ctx.longest, ctx.scaling, ctx.seen = longest, scaling, seen
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, sinks, ends, out, lse = ctx.saved_tensors
        datums = (ends, ends, ctx.longest, ctx.longest)
        causal, no_dropout = ctx.seen == (-1, 0), torch.zeros(2, dtype=torch.uint64, device=q.device)
        of_qkv = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, lse, *datums, causal, no_dropout, ctx.scaling, list(ctx.seen)
        )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            probabilities = (sinks.float()[:, None] - lse).exp_()
            of_sinks = -((grad.float() * out).sum(-1).t() * probabilities).sum(-1).to(sinks.dtype)
        return *of_qkv, of_sinks, None, None, None, None


@lru_cache(maxsize=8)
def _ends(runs: tuple[Run, ...], device: torch.device) -> tuple[Tensor, int]:
    """int32 [datums + 1], where each datum begins and the last one ends, and the longest datum's tokens. All layers of
    a pass have the same."""
    lengths = [length for count, length in runs for _ in range(count)]
    return moved(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device), max(lengths)


def _cut(tensor: Tensor, runs: Sequence[Run]) -> Iterator[Tensor]:
    """Cuts [B, heads, T, D] into a tensor [B · datums, heads, length, D] for each run: a view where B is 1.

    The tokens come first while it cuts, as they do in memory. Otherwise the gradients of query, key and value would be
    copied twice a layer.
    """
    rows = tensor.transpose(1, 2)
    parts = [rows] if len(runs) == 1 else torch.split(rows, [count * length for count, length in runs], dim=1)
    for part, (count, length) in zip(parts, runs, strict=True):
        yield part.view(len(part), count, length, *part.shape[2:]).flatten(0, 1).transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns attention [datums, heads, length, E]."""
    length = q.shape[2]
    window = window if window is not None and window < length else None
    fast_plain = q.device.type == "cpu" and q.dtype is torch.bfloat16 and length <= _PLAIN_UP_TO
    attention: Attend = partial(_fused, scaling=scaling, window=window)
    needs_scores = softcap is not None or sinks is not None
    if needs_scores or fast_plain:
        attention = partial(_plain, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    if length <= _KEPT_UP_TO or not (needs_scores or window is not None):
        return attention(q, k, v)
    return _in_blocks(attention, q, k, v, window)


def _in_blocks(attention: Attend, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Returns `attention` of datums [N, heads, length, D]. A query sees `window` keys, itself the last of them; None:
    all keys up to itself."""
    count, heads, length, _ = q.shape
    seen = length if window is None else min(window, length)
    rows = length
    if length > _WHOLE_UP_TO:
        rows = min(max(_SCORES // (count * heads * seen), _LEAST_ROWS), _MOST_ROWS)
    parts = []
    for start in range(0, length, rows):
        end, first = min(start + rows, length), max(0, start + 1 - seen)
        keys, values = k[:, :, first:end], v[:, :, first:end]
        parts.append(_recomputed(attention, q[:, :, start:end], keys, values))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int | None) -> Tensor:
    length = q.shape[2]
    mask = None if window is None else _visible(length, k.shape[2], window, q.device)
    missing = -length % _STEP
    if missing and mask is None and length >= _OWN_CALL and q.device.type != "cpu" and q.dtype.itemsize == 2:
        q, k, v = (nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (q, k, v))
        return _scaled_dot_product(q, k, v, None, scaling)[:, :, :length]  # no token sees those behind it
    return _scaled_dot_product(q, k, v, mask, scaling)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes softmax(c(q kᵀ · scaling) + bias) v, causal and within `window`.

    c(x) is softcap · tanh(x / softcap) (Gemma 2), or x without a cap.
    `sinks`: [heads], one more score of the softmax for each head, without a value (gpt-oss). The query heads of one key
    head are further rows of a product."""
    count, heads, length, width = q.shape
    kv_heads, columns = k.shape[1:3]
    rows = q.reshape(count * kv_heads, heads // kv_heads * length, width)
    keys, values = (tensor.reshape(count * kv_heads, columns, -1) for tensor in (k, v))
    hidden = torch.zeros(length, columns, dtype=q.dtype, device=q.device)
    hidden.masked_fill_(~_visible(length, columns, window, q.device), float("-inf"))
    added = hidden.repeat(heads // kv_heads, 1) if bias is None else (bias + hidden).view(len(rows), -1, columns)
    if softcap is None:
        scores = torch.baddbmm(added, rows, keys.transpose(1, 2), alpha=scaling)
    else:
        scores = torch.tanh(torch.bmm(rows, keys.transpose(1, 2)) * (scaling / softcap)) * softcap + added
    if sinks is not None:
        further = sinks.view(kv_heads, -1, 1).repeat(count, 1, length).view(*scores.shape[:2], 1)
        shares = torch.softmax(torch.cat([scores, further], -1), -1)[..., :-1]
    else:
        shares = torch.softmax(scores, -1)
    return torch.bmm(shares, values).view(count, heads, length, -1)


def _visible(rows: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    """Returns bool [rows, columns]: True where a row's token sees a column's, itself or one of the window - 1 before.

    The last row is the token of the last column.
    """
    own = columns - rows
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device).tril_(own)
    return seen if window is None else seen.triu_(own + 1 - window)

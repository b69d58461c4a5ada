"""Layers of transformers' models over datums that lie end to end in one row.

Attention takes the datums' lengths as a keyword (workers/backends/training/attention.py), and most other layers work on
each token alone. The remaining layers would mix a datum with the next one: `prepare` changes their forward.

- A layer with a state (a short convolution with Gated DeltaNet, Kimi delta attention or Mamba2 behind it) runs the
  datums as rows of their own, each from the empty state. Neighbours of one length are one call.
- A short convolution by itself (Inkling) does the same.
- So does attention that counts positions by itself (Llama 4's temperature, Inkling's relative bias), or chooses the
  tokens to attend to (DeepSeek-V3.2's indexer).
- Attention within chunks of a datum (Llama 4) treats each chunk as a datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from workers.models import lora

Run = tuple[int, int]
"""(number of datums, tokens of each): adjacent datums of the same length share one call."""


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Returns the runs for datums of these token counts."""
    return [(len([*group]), length) for length, group in groupby(lengths)]


def prepare(model: nn.Module) -> None:
    """Makes the layers named above take the keyword `runs`; the runs add up to the row's tokens."""
    layers = datum_by_datum(model)
    for layer in layers:
        _run_datum_by_datum(layer)
    for module in model.modules():
        if size := _chunk_size(module):
            _attend_within_chunks(module, size)
        if convolutions := [child for child in module.children() if _is_convolution(child) and child in layers]:
            _pass_runs_on(module, convolutions)


def datum_by_datum(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that run once for each run of datums, instead of once for the row. A layer within another one
    is left out."""
    found = {
        path: module
        for path, module in model.named_modules()
        if _has_state(module) or _counts_positions(module) or _chooses_tokens(module)
    }
    return [module for path, module in found.items() if not path or path.rpartition(".")[0] not in found]


def _has_state(module: nn.Module) -> bool:
    """transformers gives such a layer its convolution over tokens as `conv1d`."""
    return isinstance(getattr(module, "conv1d", None), nn.Conv1d)


def _is_convolution(module: nn.Module) -> bool:
    """True for a convolution by itself: one of several in a layer, and numbered."""
    return hasattr(module, "conv_idx")


def _chooses_tokens(module: nn.Module) -> bool:
    return hasattr(module, "indexer")


def _counts_positions(module: Any) -> bool:
    has_bias = hasattr(module, "rel_logits_proj")
    return has_bias or (bool(getattr(module, "attn_temperature_tuning", False)) and not module.use_rope)


def _chunk_size(module: Any) -> int | None:
    """Returns the tokens of a chunk for attention within chunks, else None."""
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    index = getattr(module, "layer_idx", None)
    chunked = index is not None and index < len(types) and types[index] == "chunked_attention"
    return int(module.config.attention_chunk_size) if chunked else None


def _run_datum_by_datum(layer: Any) -> None:
    forward, attends = layer.forward, not _has_state(layer)

    def packed(hidden_states: Tensor, *, runs: Sequence[Run] = (), **others: Any) -> Any:
        """Maps [1, T, hidden size] to the same, beside None where the layer is attention."""
        parts, start, segments = [], 0, lora.in_use()
        for count, length in runs or layer.runs:
            rows = slice(start, start + count * length)
            start = rows.stop
            own = {**others, "runs": [(1, length)]} if attends else others
            if _chooses_tokens(layer):
                own |= _seen_by_an_indexer(others["position_embeddings"], rows, length)
            part = hidden_states if count * length == hidden_states.shape[1] else hidden_states[:, rows]
            with lora.use(segments.part(rows)):
                out = forward(part.view(count, length, -1), **own)
            parts.append((out[0] if attends else out).reshape(part.shape))
        joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return (joined, None) if attends else joined

    layer.forward = packed


def _seen_by_an_indexer(positions: Sequence[Tensor], rows: slice, length: int) -> dict[str, Any]:
    """Returns the keywords of attention with an indexer for datums of one length: their own part of the row's position
    embeddings [1, T, size], and the causal mask."""
    own = tuple(one[0, rows].view(-1, length, one.shape[-1]) for one in positions)
    seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=own[0].device).tril()
    return {"position_embeddings": own, "attention_mask": seen}


def _pass_runs_on(layer: Any, convolutions: Sequence[Any]) -> None:
    """Gives the runs to convolutions that the layer calls without its keywords."""
    forward = layer.forward

    def passing(*inputs: Any, runs: Sequence[Run], **others: Any) -> Any:
        for convolution in convolutions:
            convolution.runs = runs
        return forward(*inputs, runs=runs, **others)

    layer.forward = passing


def _attend_within_chunks(layer: Any, size: int) -> None:
    forward = layer.forward

    def chunked(*inputs: Any, runs: Sequence[Run], **others: Any) -> Any:
        lengths = [length for count, datum in runs for _ in range(count) for length in _chunks(datum, size)]
        return forward(*inputs, runs=runs_of(lengths), **others)

    layer.forward = chunked


def _chunks(length: int, size: int) -> Iterator[int]:
    yield from [size] * (length // size)
    if length % size:
        yield length % size

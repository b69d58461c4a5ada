"""The KV cache of a running batch, and decode attention of one new token a row over it.

Rows are right-aligned: a shorter row has zeros on its left, which the attention mask hides. A recurrent layer (Gated
DeltaNet, Mamba) keeps a state of one size for each row instead of columns. A layer of Inkling has both, and one of
DeepSeek-V3.2 further columns for its indexer.

Decode attention replaces torch's own where that is slow. On a CPU torch's kernel takes 8 times as long as the plain
formula (SmolLM2-135M, 64 rows of 100 columns, bfloat16: 4.3 ms a layer against 0.5), a third of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from app.errors import UnservableModel
from app.settings import BaseModelSettings
from workers.models.base_model import read_config
from workers.models.loading.source import explained

_SPARE_COLUMNS = 64

_NAME = "tinsmith_decode"
# The types of layers, as configurations name them, whose whole state is keys and values.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# Those whose state has one size for any number of tokens; moe and mlp have none.
_RECURRENT = {"linear_attention", "conv", "moe", "mlp"}
# Those with both.
_HYBRID = {"hybrid", "hybrid_sliding"}
# Those that choose the columns to attend to.
_INDEXED = {"indexed_attention"}


def check_samples(settings: BaseModelSettings) -> None:
    """Raises UnservableModel for a model with layers whose state the cache does not hold."""
    with explained(settings):
        config = read_config(settings).get_text_config()
    others = {*_layer_types(config)} - _ATTENTION - _RECURRENT - _HYBRID - _INDEXED
    if others:
        raise UnservableModel(
            f"base model {settings.name!r} cannot be sampled with the transformers sampler, which holds no state of "
            f"its layers of type {', '.join(sorted(others))}; use another sampler"
        )


def _layer_types(text_config: Any) -> Sequence[str]:
    return getattr(text_config, "layer_types", None) or ()


class _Columns:
    """A tensor [rows, heads, columns, size] that grows at the end without a copy in most steps."""

    def __init__(self, rows: int, width: int, like: Tensor) -> None:
        # Zeros, not garbage: attention multiplies hidden columns by 0, and 0 times NaN is NaN.
        self._store = like.new_zeros(rows, like.shape[1], width + _SPARE_COLUMNS, like.shape[3])
        self._width = width

    @property
    def used(self) -> Tensor:
        return self._store[:, :, : self._width]

    def append(self, new: Tensor) -> Tensor:
        start, self._width = self._width, self._width + new.shape[2]
        if self._width > self._store.shape[2]:
            grown = new.new_zeros(*self._store.shape[:2], self._width + _SPARE_COLUMNS, new.shape[3])
            grown[:, :, :start] = self._store[:, :, :start]
            self._store = grown
        self._store[:, :, start : self._width] = new
        return self.used

    def put(self, source: Tensor, rows: list[int], to: list[int]) -> None:
        """Copies `rows` of `source` to rows `to`, right-aligned, without columns that do not fit."""
        width = min(self._width, source.shape[2])
        self.used[to, :, self._width - width :] = source[rows, :, source.shape[2] - width :]


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of the cache, in the form that transformers' models use."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.reserve(key_states.shape[0], 0, key_states, value_states)

    def reserve(self, rows: int, width: int, keys: Tensor, values: Tensor) -> None:
        """Starts with `width` zero columns, otherwise shaped like `keys` and `values`."""
        self.dtype, self.device = keys.dtype, keys.device
        self._keys, self._values = _Columns(rows, width, keys), _Columns(rows, width, values)
        self.keys, self.values = self._keys.used, self._values.used
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._keys.append(key_states), self._values.append(value_states)
        return self.keys, self.values

    def put(self, source: GrowingLayer, rows: list[int], to: list[int]) -> None:
        self._keys.put(source.keys, rows, to)
        self._values.put(source.values, rows, to)


class IndexedLayer(GrowingLayer):
    """One layer of the cache with the columns of its indexer's keys [rows, 1, columns, size] besides."""

    _chosen_by: _Columns | None = None

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Adds keys [rows, tokens, size]; returns all of them."""
        new = keys[:, None]
        if self._chosen_by is None:
            self._chosen_by = _Columns(len(new), 0, new)
        return self._chosen_by.append(new)[:, 0]

    def put(self, source: GrowingLayer, rows: list[int], to: list[int]) -> None:
        super().put(source, rows, to)
        assert isinstance(source, IndexedLayer) and source._chosen_by is not None
        if self._chosen_by is None:
            self._chosen_by = _Columns(self.keys.shape[0], self.keys.shape[2], source._chosen_by.used)
        self._chosen_by.put(source._chosen_by.used, rows, to)


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]
    """One recurrent layer of the cache, with its states [rows, ...]."""

    @classmethod
    def join(cls, sources: Sequence[tuple[RecurrentLayer, Part]], total: int) -> RecurrentLayer:
        """Makes a layer of `total` rows, each taken from a source as its part says."""
        like = sources[0][0]
        layer = cls(like.number_of_states)
        layer.dtype, layer.device, layer.conv_kernel_size = like.dtype, like.device, dict(like.conv_kernel_size)
        layer.has_previous_state = dict(like.has_previous_state)
        layer.is_conv_states_initialized = dict(like.is_conv_states_initialized)
        layer.is_recurrent_states_initialized = dict(like.is_recurrent_states_initialized)
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(like, name).items():
                if state is not None:
                    joined = state.new_empty(total, *state.shape[1:])
                    for source, part in sources:
                        joined[part.to] = getattr(source, name)[index][part.rows]
                    getattr(layer, name)[index] = joined
        return layer


class HybridLayer(RecurrentLayer, GrowingLayer):
    """One layer of the cache with columns and states."""

    def __init__(self, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        DynamicLayer.__init__(self)

    def lazy_initialization(self, *columns: Tensor, **states: Any) -> None:
        kind = GrowingLayer if columns else RecurrentLayer
        kind.lazy_initialization(self, *columns, **states)


@dataclass(frozen=True, slots=True)
class Part:
    """Row rows[i] of `cache` becomes row to[i] of the new one. A row may be taken several times."""

    cache: Cache
    rows: list[int]
    to: list[int]


def argument(model: Any) -> str:
    """Returns the argument of the model's forward pass that takes the cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def empty(config: Any) -> Cache:
    """Returns an empty cache for a model of this configuration to fill.

    Every attention layer keeps all columns: only the mask has a sliding window."""
    config = config.get_text_config()
    types = _layer_types(config)
    if {*types} <= _ATTENTION:
        return Cache(layer_class_to_replicate=GrowingLayer)
    states = getattr(config, "number_of_conv_states", 1)
    return Cache(layers=[_layer(each, states) for each in types])


def _layer(kind: str, states: int) -> RecurrentLayer | GrowingLayer:
    if kind in _HYBRID:
        return HybridLayer(states)
    if kind in _INDEXED:
        return IndexedLayer()
    return RecurrentLayer(states) if kind in _RECURRENT else GrowingLayer()


def arrange(parts: Sequence[Part], width: int) -> Cache:
    """Makes a new cache of `width` columns from rows of others."""
    total = sum(len(part.rows) for part in parts)
    layers = []
    for index, like in enumerate(parts[0].cache.layers):
        sources = [(part.cache.layers[index], part) for part in parts]
        layer = type(like).join(sources, total) if isinstance(like, RecurrentLayer) else type(like)()
        if isinstance(layer, GrowingLayer):
            layer.reserve(total, width, like.keys, like.values)
            for source, part in sources:
                layer.put(source, part.rows, part.to)
        layers.append(layer)
    return Cache(layers=layers)


def visible(starts: Tensor, width: int) -> Tensor:
    """Returns the attention mask int64 [rows, width] of rows that begin at column starts[i]."""
    return (torch.arange(width, device=starts.device) >= starts[:, None]).long()


def use_decode_attention(model: Any) -> None:
    """Makes `model` use decode_attention, unless it needs a feature of transformers' eager attention, or transformers
    makes the mask of the columns that an indexer chose for its own implementations alone."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and not _INDEXED.intersection(_layer_types(config)):
        model.set_attn_implementation(_NAME)
        for module in model.modules():
            if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
                module.attn_temperature_tuning, module.temperature = False, partial(_llama4, module)
            if hasattr(module, "rel_logits_proj") and not module.is_sliding and module.config.log_scaling_n_floor:
                module.temperature = partial(_inkling, module.config)
                module.config = copy(module.config)
                module.config.log_scaling_n_floor = None


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Maps query [B, heads, T, D], key [B, kv heads, W, D], value [B, kv heads, W, V] and mask bool [B, 1, T, W] to
    [B, T, heads, V]. `position_bias`, [B, heads, T, W], is added to the scores."""
    if temperature := getattr(module, "temperature", None):
        factors = temperature(_seen(query, key, attention_mask))[..., None]
        query = query * factors.to(query.dtype)
        position_bias = None if position_bias is None else position_bias * factors.to(position_bias.dtype)
    if query.shape[2] > 1 or query.device.type != "cpu":
        attended: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias, **options
        )[0]
        return attended, None
    rows, heads, _, width = query.shape
    # The query heads that share a key head are further rows of one product.
    shared = query.view(rows, key.shape[1], -1, width)
    scores = torch.matmul(shared, key.transpose(2, 3)).float().mul_(width**-0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores += position_bias.view(scores.shape)
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(value.dtype), value).view(rows, 1, heads, -1), None


def _seen(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Returns how many tokens each query sees, [B or 1, 1, T].

    transformers takes the columns instead, which count the zeros on the left of a shorter row too.
    """
    if mask is not None:
        return mask.sum(-1)
    return torch.arange(key.shape[2] - query.shape[2] + 1, key.shape[2] + 1, device=query.device)[None, None]


def _llama4(module: Any, seen: Tensor) -> Tensor:
    """Returns the factors of Llama 4's queries (https://arxiv.org/abs/2501.19399)."""
    factors: Tensor = torch.log1p(torch.floor(seen / module.floor_scale)) * module.attn_scale + 1
    return factors


def _inkling(config: Any, seen: Tensor) -> Tensor:
    """Returns the factors of the queries and of the bias in Inkling's layers without a window, as transformers'
    InklingAttention scales them."""
    factors: Tensor = 1 + config.log_scaling_alpha * torch.log((seen / config.log_scaling_n_floor).clamp(min=1))
    return factors


AttentionInterface.register(_NAME, decode_attention)


AttentionMaskInterface.register(_NAME, sdpa_mask)

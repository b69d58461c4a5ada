from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import Qwen3_5TextConfig, Qwen3Config

from tests.parity import architectures
from workers.backends.sampling.transformers.kv_cache import Part, argument, arrange, empty, visible


class Older(nn.Module):
    def forward(self, input_ids, past_key_values=None, use_cache=None): ...


class Newer(nn.Module):
    def forward(self, input_ids, cache=None, use_cache=None): ...


@pytest.mark.parametrize(("model", "name"), [(Older, "past_key_values"), (Newer, "cache")])
def test_a_model_gets_the_cache_under_the_name_that_its_transformers_has(model, name):
    assert argument(model()) == name


@pytest.mark.parametrize("case", ["llama", "qwen3.5", "qwen3-vl"])
def test_no_model_warns_of_a_deprecated_name(case):
    model = architectures.random_model(architectures.config_of(case))
    cache = empty(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model(input_ids=torch.tensor([[1, 2]]), use_cache=True, **{argument(model): cache})
    assert cache.get_seq_length() == 2


def filled(*columns: list[float]):
    """A cache of one layer whose keys are columns[row][column], and values their negatives."""
    cache = empty(Qwen3Config())
    keys = torch.tensor(columns)[:, None, :, None]
    cache.update(keys, -keys, 0)
    return cache


def keys(cache) -> list[list[float]]:
    assert torch.equal(cache.layers[0].values, -cache.layers[0].keys)
    return cache.layers[0].keys[:, 0, :, 0].tolist()


def test_rows_of_several_caches_are_right_aligned_over_zeros():
    both = arrange([Part(filled([1, 2], [3, 4]), [1], [0]), Part(filled([5, 6, 7]), [0, 0], [2, 1])], 3)
    assert keys(both) == [[0, 3, 4], [5, 6, 7], [5, 6, 7]]


def test_columns_that_no_row_needs_are_dropped():
    assert keys(arrange([Part(filled([0, 0, 8, 9]), [0], [0])], 2)) == [[8, 9]]


def test_appending_past_the_spare_room_keeps_what_was_there():
    cache = arrange([Part(filled([1, 2]), [0], [0])], 2)
    for column in range(3, 203):
        new = torch.full((1, 1, 1, 1), float(column))
        seen, _ = cache.update(new, -new, 0)
        assert seen[0, 0, :, 0].tolist() == list(range(1, column + 1))
    assert cache.get_seq_length() == 202


def recurrent(*states: float):
    """A cache of a recurrent layer, whose states are states[row], and an attention layer."""
    cache = empty(Qwen3_5TextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]))
    state = torch.tensor(states)[:, None, None]
    cache.update_conv_state(state, 0)
    cache.update_recurrent_state(10 * state, 0)
    cache.update(state[..., None], -state[..., None], 1)
    return cache


def test_recurrent_states_go_with_their_rows():
    both = arrange([Part(recurrent(1, 2), [1], [0]), Part(recurrent(3), [0, 0], [2, 1])], 1)
    layer = both.layers[0]
    assert layer.conv_states[0].flatten().tolist() == [2, 3, 3]
    assert layer.recurrent_states[0].flatten().tolist() == [20, 30, 30]
    assert both.has_previous_state(0), "the next token continues from them"
    assert both.layers[1].keys.flatten().tolist() == [2, 3, 3]


def test_the_mask_hides_what_lies_before_a_rows_start():
    assert visible(torch.tensor([0, 2]), 4).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]

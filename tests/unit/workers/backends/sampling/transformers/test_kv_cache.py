from __future__ import annotations

import torch

from workers.backends.sampling.transformers.kv_cache import Part, arrange, empty, visible


def filled(*columns: list[float]):
    """A cache of one layer whose keys are columns[row][column], and values their negatives."""
    cache = empty()
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


def test_the_mask_hides_what_lies_before_a_rows_start():
    assert visible(torch.tensor([0, 2]), 4).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.ops import Ragged
from workers.backends.training.batch_ops import Column, MicroBatch, cut

LENGTHS = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=4)


def datums(batch: MicroBatch) -> list[tuple[int, int]]:
    return [(share.job, int(datum)) for share in batch.shares for datum in share.datums]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 128), st.booleans())
def test_every_datum_is_in_one_micro_batch_within_the_limit(lengths: list[list[int]], limit: int, packed: bool) -> None:
    batches = cut(lengths, limit, packed=packed)
    seen = [pair for batch in batches for pair in datums(batch)]
    assert sorted(seen) == [(op, datum) for op, ns in enumerate(lengths) for datum in range(len(ns))]
    for batch in batches:
        assert batch.lengths == [lengths[op][datum] for op, datum in datums(batch)]
        cost = sum(batch.lengths) if packed else len(batch.lengths) * max(batch.lengths)
        assert len(batch.lengths) == 1 or cost <= limit


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 128))
def test_blocks_hold_whole_datums_in_the_order_of_their_tokens(lengths: list[list[int]], limit: int) -> None:
    for batch in cut(lengths, 128, packed=True):
        blocks = list(batch.blocks(limit))
        assert [pair for _, block in blocks for pair in datums(block)] == datums(batch)
        ends = [0, *np.cumsum([sum(block.lengths) for _, block in blocks]).tolist()]
        assert [(rows.start, rows.stop) for rows, _ in blocks] == list(pairwise(ends))
        assert all(sum(block.lengths) <= limit or len(block.lengths) == 1 for _, block in blocks)


@settings(deadline=None)
@given(LENGTHS)
def test_datums_of_an_op_are_together(lengths: list[list[int]]) -> None:
    for batch in cut(lengths, 64, packed=True):
        ops = [share.job for share in batch.shares]
        assert ops == sorted(set(ops))


@pytest.mark.parametrize("packed", [False, True])
def test_similar_lengths_share_a_micro_batch(packed: bool) -> None:
    assert [batch.lengths for batch in cut([[3, 30, 4, 29]], 60, packed=packed)] == [[30, 29], [4, 3]]


@pytest.mark.parametrize("packed", [False, True])
def test_datums_that_just_fit_share_each_micro_batch_and_block(packed: bool) -> None:
    batches = cut([[32, 32, 32, 32]], 64, packed=packed)
    assert [batch.lengths for batch in batches] == [[32, 32], [32, 32]]
    assert [block.lengths for _, block in cut([[8] * 8], 64, packed=packed)[0].blocks(32)] == [[8] * 4, [8] * 4]


def test_a_block_pads_with_zeros_and_knows_where_each_element_came_from() -> None:
    column = Column(Ragged.of([np.array([[1, 2], [3, 4]]), np.array([5, 6, 7])], np.int64))
    block = column.block(np.array([1, 0]), 4)
    assert block.tolist() == [
        [[5, 0], [6, 0], [7, 0], [0, 0]],
        [[1, 2], [3, 4], [0, 0], [0, 0]],
    ]
    where = column.positions(np.array([1, 0]), 4)
    assert where[where >= 0].tolist() == [4, 5, 6, 0, 1, 2, 3]


def test_a_column_gives_its_arrays_end_to_end() -> None:
    column = Column(Ragged.of([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])], np.int32))
    assert column.flat(np.array([2, 0])).tolist() == [4, 5, 6, 1, 2]

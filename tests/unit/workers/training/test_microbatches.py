from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.domain.batch import Ragged
from workers.training.microbatches import Column, cut

LENGTHS = st.lists(st.lists(st.integers(0, 60), max_size=12), min_size=1, max_size=4)


@given(LENGTHS, st.integers(1, 128))
def test_every_datum_is_in_one_micro_batch_within_the_limit(lengths: list[list[int]], limit: int) -> None:
    batches = cut(lengths, limit)
    seen = [(share.op, int(datum)) for batch in batches for share in batch.shares for datum in share.datums]
    assert sorted(seen) == [(op, datum) for op, ns in enumerate(lengths) for datum in range(len(ns))]
    for batch in batches:
        rows = sum(len(share.datums) for share in batch.shares)
        assert rows == 1 or rows * batch.length <= limit
        assert batch.length >= max(lengths[share.op][datum] for share in batch.shares for datum in share.datums)


@given(LENGTHS)
def test_rows_of_an_op_are_together(lengths: list[list[int]]) -> None:
    for batch in cut(lengths, 64):
        ops = [share.op for share in batch.shares]
        assert ops == sorted(set(ops))


def test_similar_lengths_share_a_micro_batch() -> None:
    assert [batch.length for batch in cut([[3, 30, 4, 29]], 60)] == [30, 4]


def test_a_block_pads_with_zeros_and_knows_where_each_element_came_from() -> None:
    column = Column(Ragged.of([np.array([[1, 2], [3, 4]]), np.array([5, 6, 7])], np.int64))
    block = column.block(np.array([1, 0]), 4)
    assert block.tolist() == [
        [[5, 0], [6, 0], [7, 0], [0, 0]],
        [[1, 2], [3, 4], [0, 0], [0, 0]],
    ]
    where = column.positions(np.array([1, 0]), 4)
    assert where[where >= 0].tolist() == [4, 5, 6, 0, 1, 2, 3]

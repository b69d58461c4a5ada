from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from workers.backends.sampling.vllm import patches

if TYPE_CHECKING:  # importing vLLM takes seconds, in every process that collects this file
    from vllm.logprobs import FlatLogprobs


def piece(*positions: Sequence[int]) -> FlatLogprobs:
    """A piece as vLLM makes it: at each position the sampled token first, then the likeliest."""
    from vllm.logprobs import FlatLogprobs

    made = FlatLogprobs()
    for ids in positions:
        ranks = itertools.chain((1,), range(1, len(ids)))
        made.append_fast(list(ids), [-float(id_) for id_ in ids], ranks, [None] * len(ids))
    return made


@pytest.fixture(autouse=True)
def repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.logprobs import FlatLogprobs

    monkeypatch.setattr(FlatLogprobs, "extend", FlatLogprobs.extend)  # restored after the test
    patches.repair_pieces.__wrapped__()


def test_pieces_that_become_one_keep_a_sampled_token_that_is_among_the_likeliest_too():
    first, second = piece([5, 5, 6], [7, 5, 6]), piece([8, 8, 9], [9, 8, 9])
    first.extend(second)
    assert first.token_ids == [5, 5, 6, 7, 5, 6, 8, 8, 9, 9, 8, 9]
    assert first.logprobs == [-float(id_) for id_ in first.token_ids]
    assert first.ranks == [1, 1, 2] * 4
    assert len(first) == 4
    assert first[3].keys() == {9, 8}


def test_positions_in_dicts_are_taken_as_before():
    whole, other = piece([1, 2]), piece([3, 4])
    whole.extend([other[0]])
    assert whole.token_ids == [1, 2, 3, 4]

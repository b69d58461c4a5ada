"""Blocks and generators that the vLLM patches for CPU touch. tests/conformance shows that the patches are needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workers.backends.sampling.vllm.patches import _keep_generators, new_blocks


def test_new_blocks_are_those_not_yet_filled():
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=([1, 2, 3], [11, 12, 13]), num_computed_tokens=0),
            SimpleNamespace(block_ids=([4, 5, 6],), num_computed_tokens=64),
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["running", "growing", "resumed"],
            new_block_ids=[None, ([7],), ([8, 9],)],
            num_computed_tokens=[40, 64, 32],
            resumed_req_ids={"resumed"},
        ),
    )
    assert new_blocks(scheduled, 32) == [1, 2, 3, 11, 12, 13, 6, 7, 9]


class Runner:
    """Records the rows that are sampled with a generator."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(num_reqs=3, generators={0: "a", 1: "b"})
        self.discard_request_mask = SimpleNamespace(np=np.array([False, True, True, True]))

    def sample_tokens(self, grammar: Any) -> dict[int, str]:
        if grammar is not None:
            raise ValueError(grammar)
        return dict(self.input_batch.generators)


def test_a_row_whose_token_is_thrown_away_keeps_its_generator_as_it_was():
    _keep_generators(Runner)
    runner = Runner()
    assert runner.sample_tokens(None) == {0: "a"}
    with pytest.raises(ValueError, match="broken"):
        runner.sample_tokens("broken")
    assert runner.input_batch.generators == {0: "a", 1: "b"}

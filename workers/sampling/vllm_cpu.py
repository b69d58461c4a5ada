"""Two repairs of vLLM 0.32 on a CPU, for its worker processes.

**Prompts in chunks under a seed.** While a prompt is on its way in chunks, vLLM draws a token behind each, throws it
away, and winds the request's generator back by its offset. Those of a CPU have none, so the engine dies of the first
chunked prompt with a seed, and ours all have one. Here, a row whose token is thrown away draws without its generator,
which then needs no winding.

**Blocks that held NaN.** The attention of a CPU multiplies what is behind the end of a sequence in its last block by 0,
and 0 times NaN is NaN: a request that is given a block of one whose adapter overflowed fails with it. vLLM can clear
blocks as it hands them out, and does so for caches of mixed precision alone; here, always.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def repair() -> None:
    """Repair vLLM's model runner for CPUs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    _keep_generators(CPUModelRunner)
    _clear_blocks(CPUModelRunner)


def _keep_generators(runner: Any) -> None:
    sample_tokens = runner.sample_tokens

    def sample_tokens_without(self: Any, *args: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        kept_out = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return sample_tokens(self, *args)
        finally:
            generators.update(kept_out)

    runner.sample_tokens = sample_tokens_without


def _clear_blocks(runner: Any) -> None:
    update_states = runner._update_states

    def update_states_on_clear_blocks(self: Any, scheduled: Any) -> Any:
        self._zero_block_ids(new_blocks(scheduled, self.cache_config.block_size))
        return update_states(self, scheduled)

    runner._update_states = update_states_on_clear_blocks


def new_blocks(scheduled: Any, size: int) -> list[int]:
    """The cache blocks of `size` tokens that a step's requests are given and have not filled before.

    A request that starts, or comes back, is told all of its blocks: the first may be from the prefix cache.
    """
    given = [(new.block_ids, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    running = scheduled.scheduled_cached_reqs
    for request_id, groups, computed in zip(
        running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
    ):
        given.append((groups or (), computed if request_id in running.resumed_req_ids else 0))
    return [block for groups, computed in given for blocks in groups for block in blocks[computed // size :]]

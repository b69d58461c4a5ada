"""A repair of vLLM 0.32, in the sampler's own process: pieces of a streamed answer that nobody has fetched yet.

vLLM makes one piece of them, each position's logprobs by way of a dict. A sampled token that is among the likeliest too
is in there once, and that position has an entry less than it should.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def repair() -> None:
    """Have vLLM put them together as they are. Once a process."""
    from vllm.logprobs import FlatLogprobs

    extend = FlatLogprobs.extend

    def extend_whole(self: Any, more: Any) -> None:
        if not isinstance(more, FlatLogprobs):
            extend(self, more)
            return
        behind = len(self.logprobs)
        self.start_indices += [behind + start for start in more.start_indices]
        self.end_indices += [behind + end for end in more.end_indices]
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.decoded_tokens += more.decoded_tokens

    FlatLogprobs.extend = extend_whole

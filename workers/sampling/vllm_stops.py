"""A repair of vLLM 0.32, in the sampler's own process: stop strings behind a prompt that ends in half a character.

With the character's end vLLM takes all of the prompt's text for the sample's, and stops at what it finds there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers.decoders import DecodeStream

from workers.sampling.stopping import seen


@cache
def repair() -> None:
    """Have vLLM begin behind such a prompt as StopText does. Once a process."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    _begin_behind_prompts(FastIncrementalDetokenizer)


def _begin_behind_prompts(detokenizer: Any) -> None:
    begin = detokenizer.__init__

    def begin_behind_prompt(self: Any, tokenizer: Any, request: Any) -> None:
        begin(self, tokenizer, request)
        if not seen(self.tokenizer, request.prompt_token_ids):
            self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)

    detokenizer.__init__ = begin_behind_prompt

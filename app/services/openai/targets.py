"""What a call is for: a sampler, and the tokenizer of its base model."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.domain.base_models import BaseModelInfo
from app.domain.records import Sampler
from app.domain.sampling import SampleRequest
from app.services.checks.sampling import check_sample
from app.services.openai.tokenizer import BaseTokenizer
from app.wire.json_bodies import text_tokens


@dataclass(frozen=True, slots=True)
class Target:
    """`info` is what a live sampler says of the base model."""

    sampler_id: str
    sampler: Sampler
    info: BaseModelInfo
    tokenizer: BaseTokenizer

    def prompts(self, given: Any) -> list[np.ndarray]:
        """int32 [n] each, of a text, of token ids, or of a list of either. Raises BadRequest for what is no int32."""
        several = isinstance(given, list) and not isinstance(given[0], int)
        return [self._tokens(prompt) for prompt in (given if several else [given])]

    def request(
        self,
        asked: Mapping[str, Any],
        prompt: np.ndarray,
        most: int | None,
        *,
        top: int = 0,
        score_prompt: bool = False,
    ) -> SampleRequest:
        """A checked request for at most `most` tokens (None: as many as the context holds), with the `top` likeliest
        at each place. Raises BadRequest.

        Only the sampled tokens themselves are told of as they come, so a request for more is not streamed.
        """
        room = max(1, self.info.max_context - len(prompt))
        stop = asked["stop"] or ()
        request = SampleRequest(
            prompt=prompt,
            num_samples=asked["n"],
            max_tokens=room if most is None else min(room, max(1, most)),
            seed=secrets.randbits(31) if asked["seed"] is None else asked["seed"],
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            prompt_logprobs=score_prompt,
            prompt_top=top if score_prompt else 0,
            sample_top=top,
            stream=asked["stream"] and not (top or score_prompt) and most != 0,
        )
        check_sample(request, self.info)
        return request

    def _tokens(self, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, self.info.max_context)
        return text_tokens([{"tokens": prompt}], "prompt")

"""A sampling request in vLLM's words, and what it answers in ours."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.domain import codec
from app.domain.sampling import SampledSequence, SampleRequest, TokenLogprobs
from workers.sampling import scoring, vllm_scoring
from workers.sampling.requests import check_finite, sample_seed
from workers.sampling.watch import Drawn


def params(
    request: SampleRequest, index: int, limit: int, ends: frozenset[int], *, streams: bool, read_cache: bool
) -> Any:
    """vLLM's SamplingParams for sample `index`, of at most `limit` tokens. The first one scores the prompt, from the
    prefix cache too if `read_cache`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    scores = index == 0 and scoring.wanted(request)
    return SamplingParams(
        max_tokens=limit,
        # torch.Generator, which vLLM seeds with it, takes 63 bits without wrapping.
        seed=int(sample_seed(request.seed, index).generate_state(1, np.uint64)[0] >> 1),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        stop=list(request.stop_strings),
        stop_token_ids=sorted(ends.union(request.stop_tokens)),
        ignore_eos=True,  # they are among the stop tokens
        logprobs=request.sample_top,
        flat_logprobs=True,
        detokenize=bool(request.stop_strings),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
        extra_args={vllm_scoring.KEY: codec.encode(request)} if scores else None,
        skip_reading_prefix_cache=scores and not read_cache,
    )


def may_read_cache(request: SampleRequest) -> bool:
    """Whether the prefix cache may be used though the prompt is to be scored.

    It may hold a row that is asked for, and the request must then run again without it. So only where that is
    unlikely, the end of a prompt being asked for, and costs one token.
    """
    return request.prompt_last_n > 0 and request.max_tokens == request.num_samples == 1


class Sample:
    """One sample as vLLM gives it: piece by piece to whoever looks on, at once otherwise."""

    def __init__(self, request: SampleRequest, index: int, drawn: Drawn | None) -> None:
        self._index, self._drawn = index, drawn
        self._width = request.sample_top + 1
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._stopped = False
        self.scores: np.ndarray | None = None
        self.cached_tokens = 0

    def add(self, result: Any) -> None:
        """Take a RequestOutput. Raises UserOpError where logits were not finite."""
        piece = result.outputs[0]
        tokens = np.array(piece.token_ids, np.int32)
        # At each position the sampled token comes first, then the likeliest.
        ids = np.array(piece.logprobs.token_ids, np.int32).reshape(len(tokens), self._width)
        logprobs = np.array(piece.logprobs.logprobs, np.float32).reshape(len(tokens), self._width)
        check_finite(float(logprobs[:, 0].sum()))
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._stopped = piece.finish_reason == "stop"
        self.cached_tokens = result.num_cached_tokens or 0
        if result.prompt_token_id_logprobs is not None:
            self.scores = result.prompt_token_id_logprobs
        if self._drawn is not None:
            self._drawn(self._index, tokens.tolist(), logprobs[:, 0].tolist())

    def sequence(self) -> SampledSequence:
        ids, logprobs = np.concatenate(self._ids), np.concatenate(self._logprobs)
        top = TokenLogprobs(ids[:, 1:], logprobs[:, 1:]) if self._width > 1 else None
        return SampledSequence(ids[:, 0], logprobs[:, 0], self._stopped, top)

"""Converts sampling requests to vLLM's form and its results to ours, and scores prompts in vLLM's worker processes.

vLLM 0.32 itself gives a prompt's own and likeliest logprobs as Python lists, at every position or none, over a whole
chunk's logits at once (2,048 x 150,000 float32 are 1.2 GB). It scores chosen ids on a GPU alone, and samples no
alternatives. So a request's scores are computed here from the hidden states, 256 positions at a time. They return as
the one tensor that vLLM keeps for such scores (`prompt_token_id_logprobs`), which it passes on unchanged. Both of its
model runners are covered: the CPU has the first, a GPU the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.domain import ops
from app.domain.sampling import SampledSequence, SampleRequest, TokenLogprobs
from app.errors import ServerOpError
from workers.backends.sampling.base import OnTokens, check_finite, sample_seed
from workers.backends.sampling.token_sampler import PromptScorer

SCORES_KEY = "tinsmith_request"
LENGTH_KEY = "tinsmith_length"
_ROWS = 256
HeadFn = Callable[[Tensor], Tensor]
"""Maps hidden states [n, hidden size] to logits [n, vocabulary]."""


def sampling_params(
    request: SampleRequest,
    index: int,
    limit: int,
    ends: frozenset[int],
    length: int,
    *,
    streams: bool,
    read_cache: bool,
) -> Any:
    """Returns vLLM's SamplingParams for sample `index`, of at most `limit` tokens; vLLM samples at least one.

    The first sample scores the prompt, of which vLLM runs `length` tokens, from the prefix cache too if `read_cache`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    scores = index == 0 and request.scores_prompt
    return SamplingParams(
        max_tokens=max(1, limit),
        # vLLM seeds torch.Generator with it, which takes 63 bits without wrapping.
        seed=int(sample_seed(request.seed, index).generate_state(1, np.uint64)[0] >> 1),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        stop=list(request.stop_strings),
        stop_token_ids=sorted(ends.union(request.stop_tokens)),
        ignore_eos=True,  # end tokens are among the stop tokens
        logprobs=request.sample_top,
        flat_logprobs=True,
        detokenize=bool(request.stop_strings),
        skip_special_tokens=False,
        structured_outputs=StructuredOutputsParams(json=request.json_schema) if request.json_schema else None,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
        extra_args={SCORES_KEY: ops.encode(request), LENGTH_KEY: length} if scores else None,
        skip_reading_prefix_cache=scores and not read_cache,
    )


def may_read_cache(request: SampleRequest) -> bool:
    """Returns whether the prefix cache may be used for a prompt with scores.

    The cache may hold a row that the request needs, and the request must then run again without the cache. So the cache
    is used only where that is unlikely (the request asks for the end of the prompt) and costs one token.
    """
    return request.prompt_last_n > 0 and request.max_tokens == request.num_samples == 1


class Sample:
    """Collects one sample from vLLM: piece by piece when its RequestHandle observes it, at once otherwise."""

    def __init__(self, request: SampleRequest, index: int, on_tokens: OnTokens | None, limit: int) -> None:
        self._index, self._on_tokens, self._limit = index, on_tokens, limit
        self._width = request.sample_top + 1
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._stopped = False
        self.scores: np.ndarray | None = None

    def add(self, result: Any) -> None:
        """Adds a RequestOutput. Raises UserOpError where logits were not finite, and ServerOpError if vLLM gave the
        sample up: its grammar refused a token, or was not made."""
        piece = result.outputs[0]
        if piece.finish_reason == "error":
            raise ServerOpError("vLLM gave the sample up; its log has the reason")
        tokens = np.array(piece.token_ids, np.int32)
        # At each position the sampled token comes first, then the likeliest ones.
        ids = np.array(piece.logprobs.token_ids, np.int32).reshape(len(tokens), self._width)
        logprobs = np.array(piece.logprobs.logprobs, np.float32).reshape(len(tokens), self._width)
        check_finite(float(logprobs[:, 0].sum()))
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._stopped = piece.finish_reason == "stop"
        if result.prompt_token_id_logprobs is not None:
            self.scores = result.prompt_token_id_logprobs
        if self._on_tokens is not None and self._limit:
            self._on_tokens(self._index, tokens.tolist(), logprobs[:, 0].tolist())

    def sequence(self) -> SampledSequence:
        if not self._limit:
            return SampledSequence(np.empty(0, np.int32), np.empty(0, np.float32), stopped=False)
        ids, logprobs = np.concatenate(self._ids), np.concatenate(self._logprobs)
        top = TokenLogprobs(ids[:, 1:], logprobs[:, 1:]) if self._width > 1 else None
        return SampledSequence(ids[:, 0], logprobs[:, 0], self._stopped, top)


class PromptInChunks:
    """One request's prompt, of which the engine runs the first `length` tokens, in one step or several."""

    def __init__(self, request: SampleRequest, device: torch.device, length: int) -> None:
        self._length, self._rows = length, len(request.prompt) - 1
        self._scorer: PromptScorer | None = PromptScorer(request, device)
        self._next = self._scorer.first_row

    def add(self, begin: int, hidden: Tensor, head: HeadFn) -> Tensor | None:
        """Scores a chunk: hidden states [n, H] of the tokens from `begin` on.

        Returns the scores once, when all are there. If the engine took a needed row from its cache, it can never be
        scored: this call and all later ones return None.
        """
        scorer, end = self._scorer, begin + len(hidden)
        if scorer is None or end <= self._next:
            return None
        if begin > self._next:
            self._scorer = None
            return None
        for row in range(self._next, min(end, self._rows), _ROWS):
            stop = min(row + _ROWS, end, self._rows)
            scorer.add(row, head(hidden[row - begin : stop - begin]))
        self._next = end
        if end < self._length:
            return None
        self._scorer = None
        return scorer.flat()


def install_scoring() -> None:
    """Makes both of vLLM's model runners score the prompts of requests that carry our request."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _install_first(GPUModelRunner)
    _install_second(PromptLogprobsWorker)


def _install_first(runner: Any) -> None:
    prompt_logprobs, sample_tokens = runner._get_prompt_logprobs_dict, runner.sample_tokens

    def get_prompt_logprobs_dict(self: Any, hidden_states: Tensor, scheduled: Mapping[str, int]) -> Any:
        self.tinsmith_scores = _score_step(self, hidden_states, scheduled)
        return prompt_logprobs(self, hidden_states, scheduled)

    def sample_tokens_with_scores(self: Any, *args: Any) -> Any:
        self.tinsmith_scores = {}
        output = sample_tokens(self, *args)
        if self.tinsmith_scores:
            result = getattr(output, "_model_runner_output", output)  # async scheduling puts it inside another
            result.prompt_token_id_logprobs_dict = self.tinsmith_scores
        return output

    runner._get_prompt_logprobs_dict, runner.sample_tokens = get_prompt_logprobs_dict, sample_tokens_with_scores


def _score_step(runner: Any, hidden_states: Tensor, scheduled: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns the scores by request id, of prompts that end in this step."""
    found = {}
    for request_id, count in scheduled.items():
        state = runner.requests[request_id]
        if not hasattr(state, SCORES_KEY):
            setattr(state, SCORES_KEY, _prompt(state.sampling_params, runner.device))
        if (prompt := getattr(state, SCORES_KEY)) is not None:
            at = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
            chunk = hidden_states[at : at + count]
            if (scores := prompt.add(state.num_computed_tokens, chunk, runner.model.compute_logits)) is not None:
                found[request_id] = scores
    return found


def _install_second(worker: Any) -> None:
    add_request = worker.add_request

    def add_request_with_ours(self: Any, request_id: str, index: int, params: Any) -> None:
        add_request(self, request_id, index, params)
        if (prompt := _prompt(params, self.device)) is not None:
            self.token_id_scores[request_id] = prompt  # vLLM's remove_request empties this dict

    def compute(self: Any, head: HeadFn, hidden_states: Tensor, batch: Any, prompt_lens: Any) -> dict[str, Tensor]:
        found = {}
        for i, request_id in enumerate(batch.req_ids if self.token_id_scores else ()):
            prompt = self.token_id_scores.get(request_id)
            if prompt is not None and not _is_resumed(batch, i, prompt_lens):
                at, count = int(batch.query_start_loc_np[i]), int(batch.num_scheduled_tokens[i])
                begin = int(batch.num_computed_prefill_tokens_np[i])
                if (scores := prompt.add(begin, hidden_states[at : at + count], head)) is not None:
                    found[request_id] = scores
        return found

    worker.add_request, worker.compute_prompt_token_id_logprobs = add_request_with_ours, compute


def _is_resumed(batch: Any, i: int, prompt_lens: np.ndarray) -> bool:
    """Returns whether row `i` of the batch was preempted after its first token: its prefill has its output too.

    Its scores went out with that token. vLLM adds the request again. If its scores were sent a second time, they would
    come in a step that has no token for it, and vLLM's scheduler fails then.
    """
    return bool(prompt_lens[batch.idx_mapping_np[i]] < batch.prefill_len_np[i])


def _prompt(params: Any, device: torch.device) -> PromptInChunks | None:
    ours = (params.extra_args or {}) if params is not None else {}
    return PromptInChunks(ops.decode(ours[SCORES_KEY]), device, ours[LENGTH_KEY]) if SCORES_KEY in ours else None

"""Running prompts through the model, several at once and in bounded pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from workers import lora
from workers.sampling import kv_cache
from workers.sampling.drawing import token_logprobs
from workers.sampling.sequences import Job, segments

# Padded tokens in one pass. Scoring needs the logits of every token: 256 of a 150k vocabulary are 150 MB of float32.
PASS_TOKENS = 2048
SCORED_PASS_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompts' cache, one row each, and the logits [J, V] of the token that follows each."""

    cache: Cache
    logits: Tensor


def fits(jobs: Sequence[Job], job: Job) -> bool:
    """Whether `job` may share the prompts' pass: jobs that score and jobs that do not stay apart."""
    longest = max(len(other.request.prompt) for other in [*jobs, job])
    return not jobs or (job.wants_scores == jobs[0].wants_scores and (len(jobs) + 1) * longest <= PASS_TOKENS)


def prefill(model: Any, device: torch.device, jobs: Sequence[Job]) -> Prefilled:
    """Run the prompts of `jobs`, which are sorted by adapter, and set the prompt_logprobs they want."""
    tokens, starts = _pad([job.request.prompt for job in jobs], device)
    rows, width = tokens.shape
    scored = jobs[0].wants_scores
    piece = max(1, (SCORED_PASS_TOKENS if scored else PASS_TOKENS) // rows)
    cache = kv_cache.empty()
    scores = torch.full((rows, width), torch.nan, device=device)
    logits = torch.empty(0)
    with lora.use(segments(jobs)):
        for begin in range(0, width, piece):
            end = min(begin + piece, width)
            positions = torch.arange(begin, end, device=device) - starts[:, None]
            logits = model(
                input_ids=tokens[:, begin:end],
                attention_mask=kv_cache.visible(starts, end),
                position_ids=positions.clamp_(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=end - begin if scored else 1,
            ).logits
            if scored:
                following = tokens[:, begin + 1 : end + 1]
                scores[:, begin + 1 : end + 1] = token_logprobs(logits[:, : following.shape[1]], following)
    if scored:
        _hand_out(jobs, scores.cpu().numpy())
    return Prefilled(cache, logits[:, -1])


def _pad(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-padded tokens int64 [J, longest], and the column int64 [J] each prompt begins at."""
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    starts = [width - len(prompt) for prompt in prompts]
    return torch.from_numpy(tokens).to(device), torch.tensor(starts, device=device)


def _hand_out(jobs: Sequence[Job], scores: np.ndarray) -> None:
    for job, row in zip(jobs, scores, strict=True):
        own = row[-len(job.request.prompt) :].copy()
        own[0] = np.nan
        job.prompt_logprobs = own

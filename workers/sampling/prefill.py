"""Running prompts through the model, several at once and in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from workers import lora
from workers.sampling import kv_cache
from workers.sampling.scoring import PromptScorer
from workers.sampling.sequences import Job, segments

# Padded tokens in one pass. Scoring needs the logits of its tokens: 256 of a 150k vocabulary are 150 MB of float32.
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
    """Run the prompts of `jobs`, which are sorted by adapter, and set the scores they want."""
    tokens, begins = _pad([job.request.prompt for job in jobs], device)
    rows, width = tokens.shape
    starts = torch.tensor(begins, device=device)
    scorers = [PromptScorer(job.request, device) for job in jobs] if jobs[0].wants_scores else []
    first = min((begin + scorer.first_row for begin, scorer in zip(begins, scorers, strict=False)), default=width)
    cache = kv_cache.empty()
    logits = torch.empty(0)
    with lora.use(segments(jobs)):
        for begin, end in _pieces(rows, width, first):
            positions = torch.arange(begin, end, device=device) - starts[:, None]
            logits = model(
                input_ids=tokens[:, begin:end],
                attention_mask=kv_cache.visible(starts, end),
                position_ids=positions.clamp_(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=end - begin if begin >= first else 1,
            ).logits
            if begin >= first:
                _score(scorers, begins, begin, logits[:, : width - 1 - begin])
    for job, scorer in zip(jobs, scorers, strict=False):
        job.scores = scorer.flat().numpy()
    return Prefilled(cache, logits[:, -1])


def _pieces(rows: int, width: int, first: int) -> Iterator[tuple[int, int]]:
    """The columns [begin, end) of each pass: larger ones before column `first`, the first whose logits are wanted."""
    begin = 0
    while begin < width:
        size, limit = (PASS_TOKENS, first) if begin < first else (SCORED_PASS_TOKENS, width)
        end = min(begin + max(1, size // rows), limit)
        yield begin, end
        begin = end


def _score(scorers: Sequence[PromptScorer], begins: Sequence[int], column: int, logits: Tensor) -> None:
    """Give each its own rows of logits [J, n, V], which are those of the columns from `column` on."""
    for scorer, begin, own in zip(scorers, begins, logits, strict=True):
        skipped = max(0, begin + scorer.first_row - column)
        scorer.add(column + skipped - begin, own[skipped:])


def _pad(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, list[int]]:
    """Left-padded tokens int64 [J, longest], and the column each prompt begins at."""
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return torch.from_numpy(tokens).to(device), [width - len(prompt) for prompt in prompts]

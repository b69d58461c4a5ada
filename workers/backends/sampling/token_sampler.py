"""Samples tokens from logits and scores prompts, for both samplers: many sequences at once, or a prompt a few rows at a
time.

Row i of a prompt's logits is the model's distribution over prompt token i + 1, so a prompt of L tokens has L - 1
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from app.domain.sampling import UNSCORED, Cells, SampledSequence, SampleOutput, SampleRequest, TokenLogprobs
from app.errors import ServerOpError
from workers.backends.sampling.base import alternatives_seed

_BLOCK = 256

_SCORED_BLOCK = 32
"""Rows that are processed at the same time. Sampling from one row takes 16 bytes for each token of the vocabulary, 5 MB
for 150,000 tokens."""


class TokenSampler:
    """Samples the next token of a fixed list of rows, each with its own temperature, top_k and top_p.

    A row's token depends only on its own logits and uniform number. The inverse of the distribution's cumulative sum
    turns one uniform number into a token. So no noise of the size of the vocabulary is needed; float64 keeps that sum
    exact enough for large vocabularies.
    """

    def __init__(self, requests: Sequence[SampleRequest], device: torch.device) -> None:
        def rows(chosen: list[int]) -> Tensor:
            return torch.tensor(chosen, dtype=torch.long, device=device)

        sampled = [(i, r.top_k > 0 or r.top_p < 1) for i, r in enumerate(requests) if r.temperature > 0]
        self._free, self._cut = rows([i for i, cut in sampled if not cut]), rows([i for i, cut in sampled if cut])
        self._temperature = torch.tensor([r.temperature for r in requests], device=device)[:, None]
        self._top_k = rows([r.top_k if r.top_k > 0 else 2**62 for r in requests])[:, None]
        self._top_p = torch.tensor([r.top_p for r in requests], dtype=torch.float64, device=device)[:, None]

    def sample(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens int64 [B] and logprobs float32 [B] for logits [B, V] and uniforms float64 [B] in [0, 1).

        The logprobs are the model's own: a log-softmax of the logits before temperature, top_k and top_p.
        """
        logits = logits.float()
        tokens = logits.argmax(-1)
        if len(self._free):
            tokens[self._free] = pick(self._probabilities(logits, self._free), uniforms[self._free, None])[:, 0]
        if len(self._cut):
            kept, order = self._cut_tail(self._probabilities(logits, self._cut))
            tokens[self._cut] = order.gather(-1, pick(kept, uniforms[self._cut, None]))[:, 0]
        return tokens, token_logprobs(logits, tokens)

    def _probabilities(self, logits: Tensor, rows: Tensor) -> Tensor:
        return tempered(logits[rows], self._temperature[rows])

    def _cut_tail(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Returns probabilities by falling size, zero beyond top_k, then beyond top_p of the rest; and their order."""
        ordered, order = probabilities.double().sort(stable=True, dim=-1, descending=True)
        ordered[torch.arange(ordered.shape[-1], device=ordered.device) >= self._top_k[self._cut]] = 0
        before = ordered.cumsum(-1) - ordered
        # The most probable token always stays, even at top_p 0.
        before[:, 0] = -1
        ordered[before >= self._top_p[self._cut] * ordered.sum(-1, keepdim=True)] = 0
        return ordered, order


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns float32 log-softmax of logits [..., V] at tokens [...]."""
    logits = logits.float()
    return logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k likeliest tokens, int64 [B, k], of logits [B, V], and their logprobs, float32 [B, k].

    Both are by falling logprob.
    """
    logits = logits.float()
    values, tokens = logits.topk(k)
    return tokens, values - logits.logsumexp(-1, keepdim=True)


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the probabilities of logits [B, V] at temperatures [B, 1] above 0."""
    # The top logit becomes zero first: a tiny temperature then gives -inf for the rest, never inf - inf. A temperature
    # that float32 rounds to 0 would give 0 / 0 at the top.
    tiny = torch.finfo(logits.dtype).tiny
    return ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=tiny)).softmax(-1)


def pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns indices int64 [B, n], sampled in proportion to weights [B, V], one for each uniform [B, n] in [0, 1).

    It picks a block first, then a place in it: a running sum over a full vocabulary in float64 takes a tenth of a step.
    """
    blocks = nn.functional.pad(weights, (0, -weights.shape[-1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    place = uniforms * ends[:, -1:]
    block = _first_beyond(ends, place)
    start = nn.functional.pad(ends, (1, 0)).gather(-1, block)
    chosen = blocks[torch.arange(len(blocks), device=blocks.device)[:, None], block].cumsum(-1, dtype=torch.float64)
    within = _first_beyond(chosen, (place - start)[..., None])[..., 0]
    # NaN logits give an index beyond the end; their NaN logprob reports them.
    return (block * _BLOCK + within).clamp_(max=weights.shape[-1] - 1)


def _first_beyond(ends: Tensor, place: Tensor) -> Tensor:
    """Returns int64 [..., n]: the first of the running sums ends [..., m] that is greater than place [..., n].

    A place that rounding put at the end or beyond counts as just before the end: zero weights are never found.
    """
    place = torch.minimum(place, ends[..., -1:].nextafter(ends.new_zeros(())))
    return torch.searchsorted(ends, place, right=True).clamp_(max=ends.shape[-1] - 1)


class PromptScorer:
    """Collects one request's scores. Keeps only the scores, never the logits they come from."""

    def __init__(self, request: SampleRequest, device: torch.device) -> None:
        rows = len(request.prompt) - 1
        self._request = request
        self._following = torch.from_numpy(request.prompt[1:].astype(np.int64)).to(device)
        self._own = torch.full((rows,), torch.nan, device=device)
        self._top_ids = torch.zeros(rows, request.prompt_top, dtype=torch.int32, device=device)
        self._top = torch.full((rows, request.prompt_top), UNSCORED, device=device)
        ids = _padded(request.prompt_targets) if request.prompt_targets is not None else np.empty((rows, 0), np.int64)
        self._target_ids = torch.from_numpy(ids).to(device)
        self._targets = torch.zeros(ids.shape, device=device)
        uniforms = np.random.default_rng(alternatives_seed(request.seed)).random((rows, request.prompt_alternatives))
        self._uniforms = torch.from_numpy(uniforms).to(device)
        self._sampled = torch.zeros(uniforms.shape, dtype=torch.int32, device=device)
        self._sampled_logprobs = torch.zeros(uniforms.shape, device=device)
        self._first_own = rows - (request.prompt_last_n or rows)
        self.first_row = _first_row(request, ids, self._first_own)

    def add(self, row: int, logits: Tensor) -> None:
        """Scores rows `row`.. from their logits [n, V]; rows before `first_row` may be left out."""
        for start in range(0, len(logits), _SCORED_BLOCK):
            block = logits[start : start + _SCORED_BLOCK].float()
            self._add(slice(row + start, row + start + len(block)), block)

    def flat(self) -> Tensor:
        """Returns all scores, float32 [n] on the CPU, laid out for `output`; ids are int32 in the bits of float32."""
        parts = [self._own] if self._request.prompt_logprobs else []
        parts += [self._top_ids.view(torch.float32), self._top]
        if self._request.prompt_targets is not None:
            parts.append(self._targets[torch.from_numpy(_given(self._request.prompt_targets)).to(self._targets.device)])
        parts += [self._sampled.view(torch.float32), self._sampled_logprobs]
        return torch.cat([part.reshape(-1) for part in parts]).cpu()

    def _add(self, rows: slice, logits: Tensor) -> None:
        total = logits.logsumexp(-1, keepdim=True)
        if rows.stop > self._first_own:
            self._add_own(rows, logits, total)
        ids = self._target_ids[rows]
        self._targets[rows] = (logits.gather(-1, ids.clamp(min=0)) - total).masked_fill(ids < 0, 0)
        if self._request.prompt_alternatives:
            sampled = self._sample(rows, logits)
            self._sampled[rows] = sampled.int()
            self._sampled_logprobs[rows] = logits.gather(-1, sampled) - total

    def _add_own(self, rows: slice, logits: Tensor, total: Tensor) -> None:
        skipped = max(0, self._first_own - rows.start)
        rows, logits, total = slice(rows.start + skipped, rows.stop), logits[skipped:], total[skipped:]
        self._own[rows] = (logits.gather(-1, self._following[rows, None]) - total)[:, 0]
        if self._request.prompt_top:
            values, ids = logits.topk(self._request.prompt_top)
            self._top_ids[rows], self._top[rows] = ids.int(), values - total

    def _sample(self, rows: slice, logits: Tensor) -> Tensor:
        uniforms = self._uniforms[rows]
        if self._request.temperature == 0:
            return logits.argmax(-1, keepdim=True).expand(uniforms.shape)
        temperature = torch.full_like(logits[:, :1], self._request.temperature)
        return pick(tempered(logits, temperature), uniforms)


def output(
    request: SampleRequest, sequences: Sequence[SampledSequence], flat: np.ndarray | None, cached_tokens: int = 0
) -> SampleOutput:
    """Builds the answer from its samples and the PromptScorer's scores: float32 [n], or None if the request asked for
    none.

    Raises ServerOpError where scores are missing.
    """
    if flat is None and request.scores_prompt:
        raise ServerOpError("the engine ran the prompt but returned no scores of it")
    rest = np.empty(0, np.float32) if flat is None else flat
    rows, top, sampled = len(request.prompt) - 1, request.prompt_top, request.prompt_alternatives
    targets = request.prompt_targets
    sizes = [rows * request.prompt_logprobs, rows * top, rows * top, 0 if targets is None else len(targets.values)]
    own, top_ids, top_logprobs, values, sampled_ids, sampled_logprobs = np.split(
        rest, np.cumsum([*sizes, rows * sampled])
    )
    return SampleOutput(
        tuple(sequences),
        np.concatenate([np.full(1, np.nan, np.float32), own]) if request.prompt_logprobs else None,
        _below_unscored(TokenLogprobs(_ids(top_ids, top), top_logprobs.reshape(-1, top))) if top else None,
        None if targets is None else replace(targets, values=values),
        TokenLogprobs(_ids(sampled_ids, sampled), sampled_logprobs.reshape(-1, sampled)) if sampled else None,
        cached_tokens,
    )


def _first_row(request: SampleRequest, target_ids: np.ndarray, first_own: int) -> int:
    """Returns the first row that the request needs."""
    firsts = [len(target_ids)]
    if request.prompt_logprobs or request.prompt_top:
        firsts.append(first_own)
    if (target_ids >= 0).any():
        firsts.append(int((target_ids >= 0).any(1).argmax()))
    if request.prompt_alternatives:
        firsts.append(0)
    return min(firsts)


def _given(cells: Cells) -> np.ndarray:
    """Returns bool [rows, K]: the given cells, moved to the left of their rows; K is the most in a row."""
    counts = np.diff(cells.starts)
    given: np.ndarray = np.arange(counts.max(initial=0)) < counts[:, None]
    return given


def _padded(cells: Cells) -> np.ndarray:
    """Returns int64 [rows, K]: the ids of each row, and -1 after them."""
    given = _given(cells)
    ids = np.full(given.shape, -1, np.int64)
    ids[given] = cells.values
    return ids


def _ids(bits: np.ndarray, width: int) -> np.ndarray:
    return bits.view(np.int32).reshape(-1, width)


def _below_unscored(top: TokenLogprobs) -> TokenLogprobs:
    """Adds a row for the first token, which has no token before it and so no score."""
    k = top.tokens.shape[1]
    return TokenLogprobs(
        np.concatenate([np.zeros((1, k), np.int32), top.tokens]),
        np.concatenate([np.full((1, k), UNSCORED, np.float32), top.logprobs]),
    )

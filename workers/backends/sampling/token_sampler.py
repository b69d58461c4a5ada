"""Token sampling: from logits to tokens, for many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from app.domain.sampling import SampleRequest

_BLOCK = 256


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

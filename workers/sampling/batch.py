"""The sequences that are decoded together, one token a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from workers import lora
from workers.sampling import kv_cache
from workers.sampling.drawing import Drawer, top_logprobs
from workers.sampling.prefill import Prefilled
from workers.sampling.sequences import Job, Row, Top, segments


class RunningBatch:
    """Rows sorted by adapter, so that each adapter is one segment, over one right-aligned cache.

    Rows that ended stay as idle ones until a quarter are: dropping a row copies the whole cache.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._rows: list[Row] = []
        self._width: int
        self._cache: Cache
        self._starts: Tensor
        self._drawer: Drawer
        self._segments: lora.Segments

    @property
    def live(self) -> int:
        return sum(row.live for row in self._rows)

    def add(self, starting: Sequence[tuple[Job, int]], prefilled: Prefilled) -> None:
        """Draw the first token of starting[i][1] new samples of each prefilled job; those that go on join the batch."""
        rows = [(place, row) for place, (job, count) in enumerate(starting) for row in job.start(count)]
        logits = prefilled.logits[torch.tensor([place for place, _ in rows], dtype=torch.long, device=self._device)]
        drawn = [row for _, row in rows]
        push(drawn, Drawer([row.job.request for row in drawn], self._device), logits)
        self._compose([(prefilled.cache, place, row) for place, row in rows if row.live])

    @property
    def occupied(self) -> bool:
        """Whether there are rows, of which some or all may have ended."""
        return bool(self._rows)

    def step(self) -> None:
        """One more token for every row; without a live one they are dropped."""
        if not self.live:
            self._compose([])
            return
        width = self._width + 1
        with lora.use(self._segments):
            logits = self._model(
                input_ids=torch.tensor([[row.tokens[-1]] for row in self._rows], device=self._device),
                attention_mask=kv_cache.visible(self._starts, width),
                position_ids=(self._width - self._starts)[:, None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        self._width = width
        push(self._rows, self._drawer, logits)
        if self.live <= 0.75 * len(self._rows):
            self._compose([])

    def _compose(self, new: list[tuple[Cache, int, Row]]) -> None:
        """Put the live rows and new ones, each with its place in a cache, into a fresh cache without idle columns."""
        taken = [(self._cache, place, row) for place, row in enumerate(self._rows) if row.live] + new
        taken.sort(key=lambda entry: entry[2].job.adapter_id)
        self._rows = [row for _, _, row in taken]
        if not taken:
            self._cache = kv_cache.empty()
            return
        self._width = max(row.cached for row in self._rows)
        self._cache = kv_cache.arrange(_parts(taken), self._width)
        self._starts = torch.tensor([self._width - row.cached for row in self._rows], device=self._device)
        self._drawer = Drawer([row.job.request for row in self._rows], self._device)
        self._segments = segments([row.job for row in self._rows])


def push(rows: Sequence[Row], drawer: Drawer, logits: Tensor) -> None:
    """Draw the next token of every row from logits [B, V] and hand it to those that are live."""
    uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
    tokens, logprobs = drawer.draw(logits, uniforms)
    top = _top(rows, logits)
    for place, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
        if row.live:
            row.push(token, logprob, top.get(place))


def _top(rows: Sequence[Row], logits: Tensor) -> dict[int, Top]:
    """The likeliest tokens of the rows that ask for them, each as many as it asks for."""
    asked = {place: row.job.request.sample_top for place, row in enumerate(rows) if row.job.request.sample_top}
    if not asked:
        return {}
    tokens, logprobs = top_logprobs(logits[list(asked)], max(asked.values()))
    found = zip(tokens.int().cpu().numpy(), logprobs.cpu().numpy(), strict=True)
    return {place: (ids[:k], values[:k]) for (place, k), (ids, values) in zip(asked.items(), found, strict=True)}


def _parts(taken: Sequence[tuple[Cache, int, Row]]) -> list[kv_cache.Part]:
    """What `arrange` needs, one part a cache."""
    parts: dict[int, kv_cache.Part] = {}
    for target, (cache, place, _) in enumerate(taken):
        part = parts.setdefault(id(cache), kv_cache.Part(cache, [], []))
        part.rows.append(place)
        part.to.append(target)
    return list(parts.values())

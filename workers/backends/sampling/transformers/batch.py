"""The batch of sequences that decode together, one token a step, from the prefill of their prompts to their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from workers.backends.sampling.token_sampler import PromptScorer, TokenSampler, top_logprobs
from workers.backends.sampling.transformers import kv_cache
from workers.backends.sampling.transformers.jobs import Job, Row, Top
from workers.models import images, lora, routers
from workers.models.adapter import Adapter

# Padded tokens in one pass. Scoring needs the logits of its tokens: 256 of a 150k vocabulary are 150 MB of float32.
PASS_TOKENS = 2048
SCORED_PASS_TOKENS = 256
Columns = tuple[Cache, int]
"""A cache, and the place of a row in it."""


class RunningBatch:
    """Rows sorted by adapter, so that each adapter is one segment, over one right-aligned cache.

    Ended rows stay as idle rows until a quarter of all rows are idle: dropping a row copies the full cache. A row that
    is set aside keeps its tokens, and its columns of the cache unless memory is short. It goes on later as if nothing
    had happened; columns that it gave up are computed again.

    An error in `begin`, `join`, `set_aside` or `compact` changes nothing. After one in `step`, `clear` is due.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._cache_argument = kv_cache.argument(model)
        self._device = device
        self._rows: list[Row] = []
        self._aside: dict[Row, Columns | None] = {}
        self._compacted = 0
        """Number of live rows when idle rows were last dropped, or memory was too small for it."""
        self._width: int
        self._cache: Cache
        self._starts: Tensor
        self._shifts: Tensor
        self._token_sampler: TokenSampler
        self._segments: lora.StackedSegments

    @property
    def live(self) -> list[Row]:
        """The rows that get another token at the next step."""
        return [row for row in self._rows if row.live]

    @property
    def aside(self) -> list[Row]:
        """The live rows that are set aside, in the order in which they were."""
        self._aside = {row: columns for row, columns in self._aside.items() if row.live}
        return list(self._aside)

    @property
    def with_columns(self) -> list[Row]:
        """The rows that hold columns, idle ones too: theirs are free only after `clear` or `compact`."""
        return [*self._rows, *(row for row in self.aside if self._aside[row])]

    @property
    def occupied(self) -> bool:
        """True if there are rows: running, ended or set aside."""
        return bool(self._rows or self._aside)

    def begin(self, starting: Sequence[tuple[Job, int]], prefilled: Prefilled) -> list[Row]:
        """Samples the first token of starting[i][1] new samples of each prefilled job. Sets the unfinished ones aside,
        and returns them."""
        places = {row: place for place, (job, count) in enumerate(starting) for row in job.start(count)}
        rows = list(places)
        logits = prefilled.logits[torch.tensor([*places.values()], dtype=torch.long, device=self._device)]
        sampled = _sample(rows, TokenSampler([row.job.request for row in rows], self._device), logits)
        for row in rows:
            row.job.started += 1
        _push(rows, sampled)
        unfinished: dict[Row, Columns] = {row: (prefilled.cache, place) for row, place in places.items() if row.live}
        self._aside.update(unfinished)
        return list(unfinished)

    def set_aside(self, counts: Mapping[str, int]) -> None:
        """Sets aside so many rows of each project, those with the fewest tokens."""
        places = {row: place for place, row in enumerate(self._rows)}
        leaving: dict[Row, Columns] = {}
        for project, count in counts.items():
            rows = [row for row in self.live if row.job.handle.project == project]
            for row in sorted(rows, key=lambda row: len(row.tokens))[:count]:
                leaving[row] = kv_cache.arrange([kv_cache.Part(self._cache, [places[row]], [0])], row.cached), 0
        self._compose({}, leaving)
        self._aside.update(leaving)

    def choose(self, counts: Mapping[str, int]) -> list[Row]:
        """Returns up to so many rows of each project that are set aside."""
        chosen, taken = [], Counter[str]()
        for row in self.aside:
            project = row.job.handle.project
            if taken[project] < counts.get(project, 0):
                taken[project] += 1
                chosen.append(row)
        return chosen

    def join(self, rows: Sequence[Row]) -> None:
        """Takes rows that are set aside into the batch."""
        again = refill(self._model, self._device, [row for row in rows if not self._aside[row]])
        self._compose({row: self._aside[row] or again[row] for row in rows})
        for row in rows:
            del self._aside[row]

    def drop_columns(self, rows: Sequence[Row]) -> None:
        """Frees the columns of rows that are set aside."""
        self._aside.update(dict.fromkeys(rows))

    def clear(self) -> None:
        """Sets all rows aside, those with the most tokens first, and frees all columns."""
        rows = sorted([*self.live, *self.aside], key=lambda row: len(row.tokens), reverse=True)
        self._aside = dict.fromkeys(rows)
        self._compose({}, leaving=self._rows)

    def step(self) -> None:
        """Adds one more token to every row. Drops the rows when none is live."""
        if not self.live:
            self._compose({})
            return
        width, recorder = self._width + 1, self._rows[0].job.recorder
        with lora.use(self._segments), routers.use(recorder):
            logits = self._model(
                input_ids=torch.tensor([[row.tokens[-1]] for row in self._rows], device=self._device),
                attention_mask=kv_cache.visible(self._starts, width),
                position_ids=(self._width - self._starts + self._shifts)[:, None],
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            ).logits[:, -1]
        self._width = width
        routes = None if recorder is None else recorder.take(len(self._rows))
        sampled = _sample(self._rows, self._token_sampler, logits)
        if routes is not None:
            for row, (route,) in zip(self._rows, routes, strict=True):
                row.routes.append(route)
        _push(self._rows, sampled)

    def compact(self) -> None:
        """Drops the idle rows once they are a quarter. If memory is too small for the copy, another one is due when a
        quarter of the live rows have ended too."""
        live = len(self.live)
        if live <= 0.75 * self._compacted:
            self._compacted = live
            self._compose({})

    def _compose(self, new: Mapping[Row, Columns], leaving: Container[Row] = ()) -> None:
        """Puts new rows, and the live ones that are not leaving, into a fresh cache without idle columns."""
        kept = {row: (self._cache, place) for place, row in enumerate(self._rows) if row.live and row not in leaving}
        columns = {**kept, **new}
        rows = sorted(columns, key=lambda row: row.job.adapter_id)
        parts = _parts([columns[row] for row in rows])
        width = max((row.cached for row in rows), default=0)
        # All at once: an error in any of them changes nothing. All, also without rows: the segments hold adapters.
        self._cache, self._starts, self._shifts, self._token_sampler, self._segments, self._width = (
            kv_cache.arrange(parts, width) if rows else kv_cache.empty(self._model.config),
            torch.tensor([width - row.cached for row in rows], device=self._device),
            torch.tensor([row.job.shift for row in rows], device=self._device),
            TokenSampler([row.job.request for row in rows], self._device),
            lora.StackedSegments(segments([row.job for row in rows])),
            width,
        )
        self._rows, self._compacted = rows, len(rows)


def _sample(rows: Sequence[Row], token_sampler: TokenSampler, logits: Tensor) -> list[tuple[int, float, Top | None]]:
    """Samples the next token of every row from logits [B, V]: the token, its logprob, and the likeliest ones."""
    uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
    tokens, logprobs = token_sampler.sample(logits, uniforms)
    top = _top(rows, logits)
    return [(*one, top.get(place)) for place, one in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True))]


def _push(rows: Sequence[Row], sampled: Sequence[tuple[int, float, Top | None]]) -> None:
    """Gives the live rows their tokens."""
    for row, token in zip(rows, sampled, strict=True):
        if row.live:
            row.push(*token)


def _top(rows: Sequence[Row], logits: Tensor) -> dict[int, Top]:
    """Returns the likeliest tokens of the rows that ask for them, as many as each asks for."""
    asked = {place: row.job.request.sample_top for place, row in enumerate(rows) if row.job.request.sample_top}
    if not asked:
        return {}
    tokens, logprobs = top_logprobs(logits[list(asked)], max(asked.values()))
    found = zip(tokens.int().cpu().numpy(), logprobs.cpu().numpy(), strict=True)
    return {place: (ids[:k], values[:k]) for (place, k), (ids, values) in zip(asked.items(), found, strict=True)}


def _parts(columns: Sequence[Columns]) -> list[kv_cache.Part]:
    """Returns the input of `arrange`, one part a cache."""
    parts: dict[int, kv_cache.Part] = {}
    for target, (cache, place) in enumerate(columns):
        part = parts.setdefault(id(cache), kv_cache.Part(cache, [], []))
        part.rows.append(place)
        part.to.append(target)
    return list(parts.values())


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompts' cache, one row each, and the logits [J, V] of the token that follows each prompt."""

    cache: Cache
    logits: Tensor


def fits(jobs: Sequence[Job], job: Job) -> bool:
    """Returns whether `job` may share the prompts' pass.

    Scoring and non-scoring jobs never share one, and a prompt with images has its own.
    """
    if not jobs:
        return True
    if job.wants_scores != jobs[0].wants_scores or job.request.images or jobs[0].request.images:
        return False
    longest = max(len(other.request.prompt) for other in [*jobs, job])
    return (len(jobs) + 1) * longest <= PASS_TOKENS


def prefill(model: Any, device: torch.device, jobs: Sequence[Job]) -> Prefilled:
    """Runs the prompts of `jobs`, which are sorted by adapter, and sets their scores and routes."""
    tokens, begins = _pad([job.request.prompt for job in jobs], device)
    rows, width = tokens.shape
    starts = torch.tensor(begins, device=device)
    scorers = [PromptScorer(job.request, device) for job in jobs] if jobs[0].wants_scores else []
    first = min((begin + scorer.first_row for begin, scorer in zip(begins, scorers, strict=False)), default=width)
    cache = kv_cache.empty(model.config)
    logits = torch.empty(0)
    picture = jobs[0].see()
    embedded = images.embed(model, tokens[0], picture) if picture else None
    recorder, routes = jobs[0].recorder, []
    with lora.use(segments(jobs)), routers.use(recorder):
        for begin, end in _pieces(rows, width, first):
            past: dict[str, Any] = {kv_cache.argument(model): cache, "use_cache": True}
            past["attention_mask"] = kv_cache.visible(starts, end)
            keep = end - begin if begin >= first else 1
            if embedded is not None:
                logits = images.logits(model, keep, **embedded.piece(begin, end), **past)
            else:
                positions = (torch.arange(begin, end, device=device) - starts[:, None]).clamp_(min=0)
                logits = model(
                    input_ids=tokens[:, begin:end], position_ids=positions, logits_to_keep=keep, **past
                ).logits
            if begin >= first:
                _score(scorers, begins, begin, logits[:, : width - 1 - begin])
            if recorder is not None:
                routes.append(recorder.take(rows))
    for job, scorer in zip(jobs, scorers, strict=False):
        job.scores = scorer.flat().numpy()
    if routes:
        for job, begin, found in zip(jobs, begins, np.concatenate(routes, 1), strict=True):
            job.prompt_routes = found[begin:]
    return Prefilled(cache, logits[:, -1])


def refill(model: Any, device: torch.device, rows: Sequence[Row]) -> dict[Row, Columns]:
    """Computes the columns of rows again, in passes over their prompts and tokens."""
    found: dict[Row, Columns] = {}
    left = [(row, row.so_far()) for row in sorted(rows, key=lambda row: row.job.adapter_id)]
    while left:
        jobs: list[Job] = []
        while len(jobs) < len(left) and fits(jobs, left[len(jobs)][1]):
            jobs.append(left[len(jobs)][1])
        cache = prefill(model, device, jobs).cache
        found.update({row: (cache, place) for place, (row, _) in enumerate(left[: len(jobs)])})
        left = left[len(jobs) :]
    return found


def _pieces(rows: int, width: int, first: int) -> Iterator[tuple[int, int]]:
    """Yields the columns [begin, end) of each pass: larger ones before column `first`, the first that needs logits."""
    begin = 0
    while begin < width:
        size, limit = (PASS_TOKENS, first) if begin < first else (SCORED_PASS_TOKENS, width)
        end = min(begin + max(1, size // rows), limit)
        yield begin, end
        begin = end


def _score(scorers: Sequence[PromptScorer], begins: Sequence[int], column: int, logits: Tensor) -> None:
    """Gives each scorer its own rows of logits [J, n, V], which belong to the columns from `column` on."""
    for scorer, begin, own in zip(scorers, begins, logits, strict=True):
        skipped = max(0, begin + scorer.first_row - column)
        scorer.add(column + skipped - begin, own[skipped:])


def _pad(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, list[int]]:
    """Returns left-padded tokens int64 [J, longest], and the column where each prompt begins."""
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return torch.from_numpy(tokens).to(device), [width - len(prompt) for prompt in prompts]


def segments(jobs: Sequence[Job]) -> list[tuple[Adapter | None, int]]:
    """Returns runs of neighbours with one adapter, as workers.models.lora.use takes them."""
    runs = [list(group) for _, group in groupby(jobs, lambda job: job.adapter_id)]
    return [(run[0].adapter, len(run)) for run in runs]

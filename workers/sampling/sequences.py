"""A request on its way through the engine: a Job, and a Row for each of its samples that runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from app.domain.base_models import BaseModelInfo
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest, TokenLogprobs
from app.errors import OpError, ServerOpError
from workers.lora import Adapter
from workers.sampling import scoring
from workers.sampling.requests import check_finite, sample_seed, token_limit
from workers.sampling.stopping import StopText
from workers.sampling.vocabulary import Vocabulary
from workers.sampling.watch import Aborted, Watch

Top = tuple[np.ndarray, np.ndarray]
"""The likeliest tokens int32 [k] at a position, and their logprobs float32 [k]."""


@dataclass(slots=True, eq=False)
class Job:
    """A request with its adapter, and the future its caller waits on. `started` counts samples that got a row.

    scores: what a PromptScorer found, float32 [n].
    """

    request: SampleRequest
    adapter_id: str
    adapter: Adapter | None
    info: BaseModelInfo
    vocabulary: Vocabulary
    watch: Watch = field(default_factory=Watch)
    future: Future[SampleOutput] = field(default_factory=Future)
    started: int = 0
    scores: np.ndarray | None = None
    _finished: dict[int, SampledSequence] = field(default_factory=dict)

    @property
    def wants_scores(self) -> bool:
        return self.scores is None and scoring.wanted(self.request)

    @property
    def unstarted(self) -> int:
        return self.request.num_samples - self.started

    def start(self, count: int) -> list[Row]:
        """Rows for the next `count` samples; none when they cannot be set up, which fails the job alone."""
        try:
            rows = [Row(self, index) for index in range(self.started, self.started + count)]
        except Exception as error:
            self.fail(error)
            return []
        self.started += count
        return rows

    def finish(self, index: int, sequence: SampledSequence) -> None:
        self._finished[index] = sequence
        if self.watch.ended is not None:
            self.watch.ended()
        if len(self._finished) == self.request.num_samples:
            sequences = [self._finished[i] for i in range(self.request.num_samples)]
            with suppress(InvalidStateError):
                self.future.set_result(scoring.output(self.request, sequences, self.scores))

    def fail(self, error: BaseException) -> None:
        """End it so, unless it has ended. From any thread; its rows are idle from then on."""
        known = isinstance(error, OpError | Aborted)
        with suppress(InvalidStateError):
            self.future.set_exception(error if known else ServerOpError(f"sampling failed: {error!r}"))


class Row:
    """One sample in the making."""

    def __init__(self, job: Job, index: int) -> None:
        request = job.request
        self.job = job
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[Top] = []
        self._index = index
        self._limit = token_limit(request, job.info)
        self._uniforms = np.random.default_rng(sample_seed(request.seed, index)).random(self._limit)
        ends = frozenset() if request.ignore_eos else job.vocabulary.end_tokens
        self._end_tokens = ends.union(request.stop_tokens)
        self._stop_text = (
            StopText(job.vocabulary.tokenizer, request.prompt.tolist(), request.stop_strings)
            if request.stop_strings
            else None
        )
        self._ended = False

    @property
    def live(self) -> bool:
        return not self._ended and not self.job.future.done()

    @property
    def cached(self) -> int:
        """Columns it has in the cache: all but its newest token."""
        return len(self.job.request.prompt) + len(self.tokens) - 1

    def uniform(self) -> float:
        """The random number in [0, 1) its next token is drawn with."""
        return float(self._uniforms[len(self.tokens)]) if self.live else 0.0

    def push(self, token: int, logprob: float, top: Top | None = None) -> None:
        """Take the next token, and the likeliest if those are asked for. An error fails the row's own job alone."""
        try:
            self._push(token, logprob, top)
        except Exception as error:
            self.job.fail(error)

    def _push(self, token: int, logprob: float, top: Top | None) -> None:
        check_finite(logprob)
        self.tokens.append(token)
        self._logprobs.append(logprob)
        if top is not None:
            self._top.append(top)
        watch = self.job.watch
        watch.took += 1
        if watch.drawn is not None:
            watch.drawn(self._index, [token], [logprob])
        stopped = token in self._end_tokens or (self._stop_text is not None and self._stop_text.completes(token))
        if stopped or len(self.tokens) == self._limit:
            self._ended = True
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self._logprobs, np.float32)
            self.job.finish(self._index, SampledSequence(tokens, logprobs, stopped, self._all_top()))

    def _all_top(self) -> TokenLogprobs | None:
        if not self._top:
            return None
        ids, logprobs = zip(*self._top, strict=True)
        return TokenLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))


def segments(jobs: Sequence[Job]) -> list[tuple[Adapter | None, int]]:
    """Runs of neighbours with one adapter, as workers.lora.use takes them."""
    return [(run[0].adapter, len(run)) for _, group in groupby(jobs, lambda job: job.adapter_id) for run in [[*group]]]

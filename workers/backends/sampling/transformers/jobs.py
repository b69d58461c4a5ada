"""Requests in the engine and their samples in progress, from the first token to the result."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from app.domain.records import BaseModelInfo
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest, TokenLogprobs
from app.errors import OpError, ServerOpError
from workers.backends.sampling import token_sampler
from workers.backends.sampling.base import Aborted, RequestHandle, check_finite, sample_seed, token_limit
from workers.backends.sampling.vocabulary import StopText, Vocabulary
from workers.models import routers
from workers.models.adapter import Adapter
from workers.models.images import ImageReader, Picture

Top = tuple[np.ndarray, np.ndarray]
"""The most likely tokens int32 [k] at a position, and their logprobs float32 [k]."""


@dataclass(slots=True, eq=False)
class Job:
    """A request with its adapter, and the future that its caller waits on. `started` counts samples with a token.

    scores: the PromptScorer's result, float32 [n]. `reader` reads the images of the prompt. `shift`: the number that is
    added to the indices of its samples' tokens for their positions, because an image's tokens share positions.
    With a `recorder`, `prompt_routes` are as in SampleOutput.
    """

    request: SampleRequest
    adapter_id: str
    adapter: Adapter | None
    info: BaseModelInfo
    vocabulary: Vocabulary
    handle: RequestHandle = field(default_factory=RequestHandle)
    reader: ImageReader | None = None
    shift: int = 0
    recorder: routers.Recorder | None = None
    future: Future[SampleOutput] = field(default_factory=Future)
    started: int = 0
    scores: np.ndarray | None = None
    prompt_routes: np.ndarray | None = None
    _finished: dict[int, SampledSequence] = field(default_factory=dict)

    @property
    def wants_scores(self) -> bool:
        return self.scores is None and self.request.scores_prompt

    def see(self) -> Picture | None:
        """Returns the images of the prompt, None without any, and notes the shift. Only a prompt that runs has its
        pixels in memory."""
        if self.reader is None or not self.request.images:
            return None
        picture = self.reader.picture([(len(self.request.prompt), self.request.images)])
        self.shift = picture.shift if picture else 0
        return picture

    @property
    def unstarted(self) -> int:
        return self.request.num_samples - self.started

    def start(self, count: int) -> list[Row]:
        """Returns rows for the next `count` samples; none when their set-up fails, which fails the job alone."""
        try:
            rows = [Row(self, index) for index in range(self.started, self.started + count)]
        except Exception as error:
            self.fail(error)
            return []
        return rows

    def finish(self, index: int, sequence: SampledSequence) -> None:
        self._finished[index] = sequence
        if self.handle.on_end is not None:
            self.handle.on_end()
        if len(self._finished) == self.request.num_samples:
            sequences = [self._finished[i] for i in range(self.request.num_samples)]
            with suppress(InvalidStateError):
                output = token_sampler.output(self.request, sequences, self.scores)
                self.future.set_result(replace(output, prompt_routes=self.prompt_routes))

    def fail(self, error: BaseException) -> None:
        """Fails the job, unless it has ended. Callable from any thread; its rows are idle from then on."""
        known = isinstance(error, OpError | Aborted)
        with suppress(InvalidStateError):
            self.future.set_exception(error if known else ServerOpError(f"sampling failed: {error!r}"))


class Row:
    """One sample in progress."""

    def __init__(self, job: Job, index: int) -> None:
        request = job.request
        self.job = job
        self.tokens: list[int] = []
        self.routes: list[np.ndarray] = []
        self._logprobs: list[float] = []
        self._top: list[Top] = []
        self._index = index
        self._limit = token_limit(request, job.info)
        self._uniforms = np.random.default_rng(sample_seed(request.seed, index)).random(max(1, self._limit))
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
        """Number of its columns in the cache: all but its newest token."""
        return len(self.job.request.prompt) + len(self.tokens) - 1

    def so_far(self) -> Job:
        """Returns a job whose prompt is the row's text without its newest token: the text of its columns."""
        prompt = np.concatenate([self.job.request.prompt, np.array(self.tokens[:-1], np.int32)])
        return replace(self.job, request=replace(self.job.request, prompt=prompt))

    def uniform(self) -> float:
        """Returns the random number in [0, 1) for sampling the next token."""
        return float(self._uniforms[len(self.tokens)]) if self.live else 0.0

    def push(self, token: int, logprob: float, top: Top | None = None) -> None:
        """Adds the next token, unless the prompt fills the context, and the likeliest ones if asked for. An error fails
        the row's own job alone."""
        try:
            self._push(token, logprob, top)
        except Exception as error:
            self.job.fail(error)

    def _push(self, token: int, logprob: float, top: Top | None) -> None:
        check_finite(logprob)
        stopped = self._limit > 0 and self._add(token, logprob, top)
        if stopped or len(self.tokens) == self._limit:
            self._ended = True
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self._logprobs, np.float32)
            sequence = SampledSequence(tokens, logprobs, stopped, self._all_top(), self._all_routes())
            self.job.finish(self._index, sequence)

    def _add(self, token: int, logprob: float, top: Top | None) -> bool:
        """Adds a token. Returns whether the sample stops at it."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        if top is not None:
            self._top.append(top)
        handle = self.job.handle
        handle.sampled_tokens += 1
        if handle.on_tokens is not None:
            handle.on_tokens(self._index, [token], [logprob])
        return token in self._end_tokens or (self._stop_text is not None and self._stop_text.completes(token))

    def _all_top(self) -> TokenLogprobs | None:
        if not self._top:
            return None
        ids, logprobs = zip(*self._top, strict=True)
        return TokenLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))

    def _all_routes(self) -> np.ndarray | None:
        none = self.job.prompt_routes
        return None if none is None else np.concatenate([none[:0], *(route[None] for route in self.routes)])

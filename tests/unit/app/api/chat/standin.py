"""A thread that answers as a sampler does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.domain import ops
from app.domain.results import PROTOBUF, Result
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.errors import Fenced
from app.services.openai.tokenizer import BaseTokenizer
from app.stores.redis.completions import TokenChunk, TokenStreams
from app.stores.redis.journal import RedisOpLog
from app.wire.results import encode_sample

CAPACITY = 3
CONTEXT = 512
MAX_BODY_BYTES = 2**20
Answer = Callable[[str, SampleRequest], SampleOutput | Result | None]


@dataclass
class Standin:
    """Answers admitted requests with `answer` (None: not yet), one after another, and records them."""

    oplog: RedisOpLog
    streams: TokenStreams
    tokenizer: BaseTokenizer
    answer: Answer | None = None
    seen: list[SampleRequest] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def says(self, *texts: str, stopped: bool = True) -> None:
        """An answer whose sample i is texts[i], followed by an end token if `stopped`."""
        self.answer = lambda _, request: SampleOutput(
            tuple(self.sequence(texts[i % len(texts)], stopped) for i in range(request.num_samples))
        )

    def sequence(self, text: str, stopped: bool = True) -> SampledSequence:
        tokens = np.array([*self.tokenizer.encode(text), *([257] if stopped else [])], np.int32)
        return SampledSequence(tokens, np.linspace(-1, -2, len(tokens), dtype=np.float32), stopped)

    def draw(self, request_id: str, text: str, place: int = 0, index: int = 0) -> None:
        tokens = self.tokenizer.encode(text)
        self.streams.add([TokenChunk(request_id, index, place, tokens, np.zeros(len(tokens), np.float32))])

    def run(self) -> None:
        while not self.over.wait(0.005):
            for waiting in self.oplog.pending() if self.answer else []:
                self._finish(waiting.id)

    def _finish(self, request_id: str) -> None:
        try:
            entry = self.oplog.claim_sample(request_id, "node/test")
        except Fenced:
            return
        if entry is not None:
            self.seen.append(ops.decode(entry.payload))
            result = self.answer(request_id, self.seen[-1])
            if isinstance(result, SampleOutput):
                result = Result(encode_sample(result), PROTOBUF)
            if result is not None:
                self.oplog.finish_sample(request_id, result)

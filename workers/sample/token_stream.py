"""Publishes the tokens of a streamed sample while it runs. A thread does it, so that no engine waits for Redis."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import redis

from app.stores.redis.completions import TokenChunk, TokenStreams
from workers.backends.sampling.base import OnTokens

log = logging.getLogger(__name__)
# The API reads every piece: 20 pieces a second look smooth enough.
_EVERY_S = 0.05
# Most token pieces that wait while Redis hangs; the result delivers any further ones.
_MOST_WAITING = 65_536


class TokenPublisher:
    """Publishes sampled tokens. `callback` returns the callback for a request's RequestHandle. Pieces that cannot be
    sent are dropped: the result holds their tokens."""

    def __init__(self, streams: TokenStreams) -> None:
        self._streams = streams
        self._waiting: queue.Queue[TokenChunk | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="token-publisher", daemon=True)
        self._thread.start()

    def callback(self, request_id: str) -> OnTokens:
        """Returns a callback that takes a request's tokens from the engine's thread; it never blocks."""
        positions: Counter[int] = Counter()
        lost: set[int] = set()

        def on_tokens(index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            if index in lost:  # the reader cannot use tokens behind a gap
                return
            chunk = TokenChunk(
                request_id, index, positions[index], np.array(tokens, np.int32), np.array(logprobs, np.float32)
            )
            positions[index] += len(tokens)
            try:
                self._waiting.put_nowait(chunk)
            except queue.Full:
                lost.add(index)
                log.warning(
                    "too many tokens wait to be sent: the stream of %s stops, and its result follows", request_id
                )

        return on_tokens

    def close(self) -> None:
        """Sends the waiting tokens and ends the thread."""
        self._waiting.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            going_on = None not in batch
            self._send([chunk for chunk in batch if chunk is not None])
            time.sleep(_EVERY_S)

    def _send(self, batch: Sequence[TokenChunk]) -> None:
        try:
            self._streams.add(joined(batch))
        except (redis.RedisError, OSError) as error:
            log.warning("%d tokens were not sent: %s", sum(len(chunk.tokens) for chunk in batch), error)


def joined(batch: Sequence[TokenChunk]) -> list[TokenChunk]:
    """The same tokens in as few pieces as possible: consecutive pieces of one sample become one."""
    runs: list[list[TokenChunk]] = []
    newest: dict[tuple[str, int], list[TokenChunk]] = {}
    for chunk in batch:
        run = newest.get((chunk.request_id, chunk.index))
        if run is None or chunk.position != run[-1].position + len(run[-1].tokens):
            run = newest[chunk.request_id, chunk.index] = []
            runs.append(run)
        run.append(chunk)
    return [_concatenated(run) for run in runs]


def _concatenated(run: Sequence[TokenChunk]) -> TokenChunk:
    tokens = np.concatenate([chunk.tokens for chunk in run])
    logprobs = np.concatenate([chunk.logprobs for chunk in run])
    return TokenChunk(run[0].request_id, run[0].index, run[0].position, tokens, logprobs)

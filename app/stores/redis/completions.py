"""Completions by poll target, and the token streams of sampling requests.

Each poll target has one sorted set of completions. Its scores come from one counter for all targets, which never goes
back.

Token streams are best effort: the result contains all tokens, so also the lost ones. A sampler that runs a request
again publishes its tokens again. The streams therefore go through the broker, which persists nothing. The state
server syncs its disk for every write; on a busy machine a sync was seen to take 1.2 s. With new tokens every 50 ms,
all other writes would have to wait for these syncs too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import redis

from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import Scripts, slices
from app.stores.redis.types import Completion

_SLICE = 1000
_ACKNOWLEDGED_S = 300

# A reader that is further behind reads the rest from the result.
_MOST_ENTRIES = 4096
_KEPT_S = 120


class RedisCompletions:
    """Completed sampling requests by poll target (app/ids.py), in the order of their completion."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._run = Scripts(client, settings)
        self._kept_s = min(_ACKNOWLEDGED_S, settings.result_read_s)

    def since(self, target: str, cursor: int) -> tuple[list[Completion], int]:
        """The completions after `cursor` (0: all) whose results nobody has read, and the cursor for the next call.

        Oldest first, at most one slice. Completions up to `cursor` are deleted.
        """
        last, *rows = self._run("completions", target, cursor, _SLICE)
        ended = zip(rows[::3], rows[1::3], rows[2::3], strict=True)
        found = [Completion(request.decode(), state == b"failed", size) for request, state, size in ended]
        return found, int(last)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Notes that the results of these requests were fetched, so that they may expire earlier. Unfinished and
        unknown requests do not change."""
        for slice_ in slices(list(request_ids), _SLICE):
            self._run("note_read", self._kept_s, *slice_)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of sample `index`, from its `position`-th token on: tokens int32 [n], logprobs float32 [n]."""

    request_id: str
    index: int
    position: int
    tokens: np.ndarray
    logprobs: np.ndarray


class TokenStreams:
    """Token streams on the broker: one Redis stream per request.

    All readers of a process share its one pub/sub connection to the broker (client.Waiter), and every `add` wakes
    them. Blocking reads would need one connection per reader.
    """

    def __init__(self, broker: redis.Redis) -> None:
        self._broker = broker

    def add(self, chunks: Iterable[TokenChunk]) -> None:
        """Appends the tokens in one round trip, and wakes the readers."""
        requests = set()
        with self._broker.pipeline(transaction=False) as pipe:
            for chunk in chunks:
                pipe.xadd(keys.stream(chunk.request_id), _fields(chunk), maxlen=_MOST_ENTRIES)
                requests.add(chunk.request_id)
            for request_id in requests:
                pipe.expire(keys.stream(request_id), _KEPT_S)
                pipe.publish(keys.DONE_CHANNEL, request_id)
            pipe.execute()

    def read(self, request_id: str, after: str) -> tuple[list[TokenChunk], str]:
        """The entries after the entry `after` ("0-0" for all entries), and the id of the newest entry."""
        found = cast(Any, self._broker.xread({keys.stream(request_id): after}))
        entries = found[0][1] if found else []
        last = entries[-1][0].decode() if entries else after
        return [_chunk(request_id, fields) for _, fields in entries], last

    def drop(self, request_id: str) -> None:
        """Deletes the stream of a request when nobody reads it any more."""
        self._broker.delete(keys.stream(request_id))


def _fields(chunk: TokenChunk) -> dict[Any, Any]:
    return {
        "index": chunk.index,
        "place": chunk.position,
        "tokens": chunk.tokens.astype("<i4").tobytes(),
        "logprobs": chunk.logprobs.astype("<f4").tobytes(),
    }


def _chunk(request_id: str, fields: dict[bytes, bytes]) -> TokenChunk:
    tokens, logprobs = np.frombuffer(fields[b"tokens"], "<i4"), np.frombuffer(fields[b"logprobs"], "<f4")
    return TokenChunk(request_id, int(fields[b"index"]), int(fields[b"place"]), tokens, logprobs)

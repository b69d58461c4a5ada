"""Result stream of one sampling request: its tokens as they come, read inside the HTTP call that made the request."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import redis

from app.domain.accounts import Caller
from app.domain.results import Result
from app.domain.sampling import SampleOutput
from app.errors import ClientGone, RequestError, ServerOpError, Unavailable, UserOpError
from app.services.polling import CheckKey, FutureFinder
from app.stores.redis.client import Waiter, is_outage
from app.stores.redis.completions import TokenChunk, TokenStreams
from app.wire.results import decode_sample

_TURN_S = 1.0
_BEAT_S = 10.0
# OpenAI's own client waits this long for the next part of a stream.
_PATIENCE_S = 600.0
# A client that vanished without closing its connection holds a thread for no longer.
_LONGEST_S = 3600.0

Gone = Callable[[], bool]
"""Returns True when the client has closed the connection."""


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A sampling request that is admitted, or is about to be. `live`: its worker publishes tokens as they are
    sampled."""

    request_id: str
    caller: Caller
    live: bool


class ResultStream:
    """Reads the result stream of a request. `check_key` and `beat`, which keeps a caller's session alive, are called
    periodically. `cancel` takes a request id and the caller."""

    def __init__(
        self,
        futures: FutureFinder,
        waiter: Waiter,
        streams: TokenStreams,
        check_key: CheckKey,
        beat: Callable[[Caller], None],
        cancel: Callable[[str, Caller], None],
    ) -> None:
        self._futures, self._waiter, self._streams = futures, waiter, streams
        self._check_key, self._beat, self._cancel = check_key, beat, cancel

    def __call__(self, pending: PendingSample, gone: Gone) -> Iterator[TokenChunk | SampleOutput]:
        """Yields tokens as they come, and the whole output last. An outage does not end the stream.

        A request that runs again publishes the same tokens again, identified by their position. Raises UserOpError or
        ServerOpError if the request failed, ClientGone, Unauthorized once the caller's key is revoked, or Unavailable
        when nothing comes for `_PATIENCE_S`. A request that is not live sends nothing before its end, so it has
        `_LONGEST_S`.
        """
        after = "0-0"
        news_at = beat_at = time.monotonic()
        while True:
            chunks, after, result = self._news(pending, after)
            yield from chunks
            if result is not None:
                yield _output(result)
                return
            now = time.monotonic()
            news_at = now if chunks else news_at
            if gone():
                raise ClientGone("the client closed the connection")
            patience_s = _PATIENCE_S if pending.live else _LONGEST_S
            if now - news_at > patience_s:
                raise Unavailable(f"the sampler sent nothing for {patience_s:.0f} s; try again later")
            if now - beat_at > _BEAT_S:
                beat_at = now
                self._check_in(pending.caller)

    def _check_in(self, caller: Caller) -> None:
        """Looks the caller's key up, and keeps the session alive. In an outage the next beat does it."""
        try:
            self._check_key(caller)
            self._beat(caller)
        except (redis.RedisError, Unavailable) as error:
            if not _passes(error):
                raise

    def leave(self, pending: PendingSample, *, ended: bool) -> None:
        """Stops waiting for the request, and cancels it unless it has ended or was not admitted. In an outage the
        request is not cancelled and runs to its end."""
        with contextlib.suppress(redis.RedisError, RequestError):
            if not ended:
                self._cancel(pending.request_id, pending.caller)
            if pending.live:
                self._streams.drop(pending.request_id)

    def _news(self, pending: PendingSample, after: str) -> tuple[list[TokenChunk], str, Result | None]:
        """The available news, after a wait of at most one turn."""
        found: tuple[list[TokenChunk], str, Result | None] = ([], after, None)

        def look() -> bool:
            nonlocal found
            chunks, last = self._read_chunks(pending, after)
            result = None if chunks else self._futures.future(pending.request_id, pending.caller).result
            found = chunks, last, result
            return bool(chunks) or result is not None

        try:
            self._waiter.wait(pending.request_id, _TURN_S, look)
            if not found[0] and found[2] is None:
                look()
        except (redis.RedisError, Unavailable) as error:
            if not _passes(error):
                raise
            time.sleep(_TURN_S)
        return found

    def _read_chunks(self, pending: PendingSample, after: str) -> tuple[list[TokenChunk], str]:
        """The tokens sampled since `after`. Tokens are read before the result, because they do not wait for the state
        server's disk. While the broker is away, the result still has all tokens."""
        if pending.live:
            with contextlib.suppress(redis.RedisError):
                return self._streams.read(pending.request_id, after)
        return [], after


def _passes(error: redis.RedisError | Unavailable) -> bool:
    """True for an outage, also one of replicas or of the object store. A client that was told of it would send its
    request again, and its answer would be sampled and charged twice."""
    return isinstance(error, Unavailable) or is_outage(error)


def _output(result: Result) -> SampleOutput:
    if not result.failed:
        return decode_sample(result.body)
    failure = json.loads(result.body)
    raise (UserOpError if failure["category"] == "user" else ServerOpError)(failure["error"])

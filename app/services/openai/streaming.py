"""Waiting for a sampling request in the call that made it, with its tokens as they come."""

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
from app.services.polling import FutureLookup
from app.stores.redis.client import Waiter, is_outage
from app.stores.redis.completions import Drawn, TokenStreams
from app.wire.results import decode_sample

_TURN_S = 1.0
_BEAT_S = 10.0
# As long as OpenAI's own client waits for an answer, or for the next part of one.
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """An admitted request. `live`: its worker tells of tokens as they are drawn."""

    request_id: str
    caller: Caller
    live: bool


class Following:
    """`beat` keeps a caller's session alive, and is called now and then; `cancel` takes a request id and who asked."""

    def __init__(
        self,
        futures: FutureLookup,
        waiter: Waiter,
        streams: TokenStreams,
        beat: Callable[[Caller], None],
        cancel: Callable[[str, Caller], None],
    ) -> None:
        self._futures, self._waiter, self._streams = futures, waiter, streams
        self._beat, self._cancel = beat, cancel

    def __call__(self, asked: Asked, gone: Callable[[], bool]) -> Iterator[Drawn | SampleOutput]:
        """Tokens as they come, and last the whole output; outages are waited for.

        A request that runs again tells of its tokens again, the same ones: they go by their place. `gone` tells whether
        the client went away. Raises UserOpError or ServerOpError as the request failed, ClientGone, or Unavailable when
        nothing comes for long.
        """
        after = "0-0"
        news_at = beat_at = time.monotonic()
        while True:
            drawn, after, result = self._news(asked, after)
            yield from drawn
            if result is not None:
                yield _output(result)
                return
            now = time.monotonic()
            news_at = now if drawn else news_at
            if gone():
                raise ClientGone("the client has gone away")
            if now - news_at > _PATIENCE_S:
                raise Unavailable(f"the sampler gave nothing for {_PATIENCE_S:.0f} s; try again later")
            if now - beat_at > _BEAT_S:
                beat_at = now
                self._beat(asked.caller)

    def leave(self, asked: Asked, *, ended: bool) -> None:
        """Nobody waits for it any more; it is cancelled unless it has ended. In an outage it is left to its end."""
        with contextlib.suppress(redis.RedisError, RequestError):
            if not ended:
                self._cancel(asked.request_id, asked.caller)
            if asked.live:
                self._streams.drop(asked.request_id)

    def _news(self, asked: Asked, after: str) -> tuple[list[Drawn], str, Result | None]:
        """What there is, waiting a turn for it."""
        found: tuple[list[Drawn], str, Result | None] = ([], after, None)

        def look() -> bool:
            nonlocal found
            drawn, last = self._drawn(asked, after)
            result = None if drawn else self._futures.future(asked.request_id, asked.caller).result
            found = drawn, last, result
            return bool(drawn) or result is not None

        try:
            self._waiter.wait(asked.request_id, _TURN_S, look)
            if not found[0] and found[2] is None:
                look()
        except redis.RedisError as error:
            if not is_outage(error):
                raise
            time.sleep(_TURN_S)
        return found

    def _drawn(self, asked: Asked, after: str) -> tuple[list[Drawn], str]:
        """Tokens first: they need not wait for the state server's disk, and while the broker is away the result has
        them all."""
        if asked.live:
            with contextlib.suppress(redis.RedisError):
                return self._streams.read(asked.request_id, after)
        return [], after


def _output(result: Result) -> SampleOutput:
    if not result.failed:
        return decode_sample(result.body)
    failure = json.loads(result.body)
    raise (UserOpError if failure["category"] == "user" else ServerOpError)(failure["error"])

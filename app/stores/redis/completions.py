"""Completions on Redis: one sorted set a poll target, by a count that goes through all of them and never goes back."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from app.settings import EngineSettings
from app.stores.interfaces import Completion
from app.stores.redis import keys
from app.stores.redis.scripts import Scripts

_SLICE = 1000
_ACKNOWLEDGED_S = 300


class RedisCompletions:
    """See app.stores.interfaces.Completions."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)
        self._kept_s = min(_ACKNOWLEDGED_S, settings.result_read_s)

    def since(self, target: str, cursor: int) -> tuple[list[Completion], int]:
        last, *rows = self._run("completions", target, cursor, _SLICE)
        ended = zip(rows[::3], rows[1::3], rows[2::3], strict=True)
        found = [Completion(request.decode(), state == b"failed", size) for request, state, size in ended]
        return found, int(last)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                # XX: what is not finished has no end yet, and must not get one.
                pipe.expire(keys.future(request_id), self._kept_s, xx=True, lt=True)
            pipe.execute()

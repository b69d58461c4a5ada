"""Calls on Redis: read off their futures, which expire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import redis

from app import ids
from app.domain.results import FutureState
from app.stores.interfaces import Call
from app.stores.redis import keys

_MOST = 10_000
_SLICE = 500


class RedisCalls:
    """See app.stores.interfaces.Calls."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def of_model(self, model_id: str) -> list[Call]:
        waiting = cast(list[bytes], self._redis.zrange(keys.journal(model_id), -1, -1))
        applied = cast("bytes | None", self._redis.hget(keys.model(model_id), "applied"))
        newest = max(int(seq) for seq in (applied or -1, *waiting))
        return self.of(ids.request_id(model_id, seq) for seq in range(max(0, newest + 1 - _MOST), newest + 1))

    def of_sampler(self, sampler_id: str) -> list[Call]:
        joined = int(cast("bytes | None", self._redis.hget(keys.record("samplers", sampler_id), "joined")) or 0)
        targets = [ids.poll_target(sampler_id, clone) for clone in range(joined + 1)]
        found = {request.decode() for request in cast(set[bytes], self._redis.smembers(keys.sampled(sampler_id)))}
        for target in targets:
            found.update(
                one.decode() for one in cast(list[bytes], self._redis.zrange(keys.completed(target), -_MOST, -1))
            )
        return self.of(sorted(found))

    def of(self, request_ids: Iterable[str]) -> list[Call]:
        wanted, calls = list(request_ids), []
        for start in range(0, len(wanted), _SLICE):
            slice_ = wanted[start : start + _SLICE]
            with self._redis.pipeline(transaction=False) as pipe:
                for request_id in slice_:
                    pipe.hmget(keys.future(request_id), "kind", "state", "admitted", "ended")
                found = pipe.execute()
            calls += [_call(request_id, fields) for request_id, fields in zip(slice_, found, strict=True) if fields[2]]
        return calls


def _call(request_id: str, fields: list[bytes]) -> Call:
    kind, state, admitted, ended = fields
    return Call(
        request_id,
        kind.decode(),
        cast(FutureState, state.decode()),
        int(admitted) / 1000,
        int(ended) / 1000 if ended else None,
    )

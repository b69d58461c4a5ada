"""The backlog on Redis: all waiting calls, and the calls of a model or a sampler, found by their futures.

Both are read in slices, so that the server can answer other clients in between.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import filterfalse
from math import inf
from typing import NamedTuple, cast

import redis

from app import ids
from app.domain.results import FutureState
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import Scripts, slices, texts
from app.stores.redis.types import Call, ModelLine, Unfinished, Waiting, WaitingSample

_SLICE = 1000
_MOST_CALLS, _CALLS_SLICE = 10_000, 500


class _Sampler(NamedTuple):
    """A sampler with waiting requests. `paused` are the ids of those that wait until its session is heard again."""

    owner: str
    queue: str
    paused: Set[str]


class RedisBacklog:
    """All waiting and running work of every project. It changes between reads, so parts of it may be some milliseconds
    apart."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def unfinished(self, most: int) -> Unfinished:
        """The `most` models and samples that waited longest without progress."""
        found = texts(self._redis.zrange(keys.PENDING, 0, most - 1))
        models = list(filter(ids.is_model_id, found))
        samples = self._samples(list(filterfalse(ids.is_model_id, found)))
        queues = sorted({sample.queue for sample in samples})
        return Unfinished(self._lines(models), samples, {queue: self._sequences(queue) for queue in queues})

    def by_queue(self) -> dict[str, Waiting]:
        """All that waits, by queue. A throttled request counts as waiting since now."""
        seconds, micros = self._redis.time()
        now_ms = seconds * 1000 + micros / 1000
        numbers, oldest_s = Counter[str](), dict[str, float]()
        for queue, since_ms in self._waiting():
            numbers[queue] += 1
            oldest_s[queue] = max(oldest_s.get(queue, 0.0), (now_ms - since_ms) / 1000)
        return {queue: Waiting(number, oldest_s[queue]) for queue, number in numbers.items()}

    def _waiting(self) -> Iterator[tuple[str, float]]:
        """(queue, ms of the last progress) of each model and request that waits."""
        # A slice begins at the last score of the one before, as ranks change when others end meanwhile.
        start_ms, read, is_last = -inf, set[bytes](), False
        while not is_last:
            most = _SLICE + len(read)
            answer = self._redis.zrangebyscore(keys.PENDING, start_ms, inf, start=0, num=most, withscores=True)
            found = cast(list[tuple[bytes, float]], answer)
            rows = [row for row in found if row[0] not in read]
            if not rows:
                return
            queues = self._redis.hmget(keys.PENDING_QUEUE, [id_.decode() for id_, _ in rows])
            for queue, (_, since_ms) in zip(cast(list[bytes | None], queues), rows, strict=True):
                if queue is not None:  # else it has ended meanwhile
                    yield queue.decode(), since_ms
            start_ms, is_last = found[-1][1], len(found) < most
            read = {id_ for id_, since_ms in found if since_ms == start_ms}

    def seqs(self, model_ids: Sequence[str]) -> dict[str, list[int]]:
        """The waiting seqs of each model, in order, including consumed ones."""
        found = {}
        for slice_ in slices(model_ids, _SLICE):
            with self._redis.pipeline(transaction=False) as pipe:
                for model_id in slice_:
                    pipe.hget(keys.model(model_id), "applied")
                applied = pipe.execute()
                for model_id, last in zip(slice_, applied, strict=True):
                    pipe.zrangebyscore(keys.journal(model_id), f"({int(last or -1)}", "+inf")
                for model_id, waiting in zip(slice_, pipe.execute(), strict=True):
                    found[model_id] = [int(seq) for seq in waiting]
        return found

    def owners(self, ids_: Sequence[str]) -> list[str]:
        """The project of each waiting model or sampling request; empty for one that has ended."""
        with self._redis.pipeline(transaction=False) as pipe:
            for id_ in ids_:
                pipe.hget(keys.model(id_) if ids.is_model_id(id_) else keys.future(id_), "owner")
            found = cast("list[bytes | None]", pipe.execute())
        # A record has JSON, and a future has plain text.
        return [(owner or b"").decode().strip('"') for owner in found]

    def running(self, request_ids: Sequence[str]) -> set[str]:
        """Those of these sampling requests that a sampler has begun."""
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.exists(keys.lease(request_id))
            return {id_ for id_, held in zip(request_ids, pipe.execute(), strict=True) if held}

    def _lines(self, model_ids: Sequence[str]) -> list[ModelLine]:
        lines = []
        for slice_ in slices(model_ids, _SLICE):
            for model_id, row in zip(slice_, self._run("lines", *slice_), strict=True):
                if row:
                    owner, queue, node, applied, waiting, running, admitted = row
                    where = json.loads(owner), queue.decode(), node.decode()
                    lines.append(ModelLine(model_id, *where, applied, waiting, bool(running), bool(admitted)))
        return lines

    def _samples(self, request_ids: Sequence[str]) -> list[WaitingSample]:
        parents = [ids.parent_of(id_) for id_ in request_ids]
        # All requests of a sampler are in one queue; the last request is the least likely to have ended meanwhile.
        samplers = self._samplers(dict(zip(parents, request_ids, strict=True)))
        return [
            WaitingSample(id_, sampler.owner, sampler.queue, id_ in sampler.paused)
            for parent, id_ in zip(parents, request_ids, strict=True)
            if (sampler := samplers.get(parent))
        ]

    def _samplers(self, requests: Mapping[str, str]) -> dict[str, _Sampler]:
        """The samplers by id. `requests` gives one request of each; a sampler is left out if either has ended."""
        found = {}
        for slice_ in slices(list(requests.items()), _SLICE):
            with self._redis.pipeline(transaction=False) as pipe:
                for sampler_id, request_id in slice_:
                    pipe.hget(keys.record("samplers", sampler_id), "owner")
                    pipe.hget(keys.PENDING_QUEUE, request_id)
                    pipe.smembers(keys.paused(sampler_id))
                answers = pipe.execute()
            rows = zip(slice_, answers[::3], answers[1::3], answers[2::3], strict=True)
            for (sampler_id, _), owner, queue, paused in rows:
                if owner and queue:
                    found[sampler_id] = _Sampler(json.loads(owner), queue.decode(), set(texts(paused)))
        return found

    def _sequences(self, queue: str) -> int:
        return sum(map(int, cast(list[bytes], self._redis.hvals(keys.placed(queue)))))


class RedisCalls:
    """The calls of a model or a sampler with their times, as far as their futures are kept."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def of_model(self, model_id: str) -> list[Call]:
        """The calls of a model by seq, the newest 10,000."""
        waiting = cast(list[bytes], self._redis.zrange(keys.journal(model_id), -1, -1))
        applied = cast("bytes | None", self._redis.hget(keys.model(model_id), "applied"))
        newest = max(int(seq) for seq in (applied or -1, *waiting))
        return self.of(ids.request_id(model_id, seq) for seq in range(max(0, newest + 1 - _MOST_CALLS), newest + 1))

    def of_sampler(self, sampler_id: str) -> list[Call]:
        """The calls of a sampler that run, or have results that nobody has read, by id; the newest 10,000 of each
        client."""
        joined = int(cast("bytes | None", self._redis.hget(keys.record("samplers", sampler_id), "joined")) or 0)
        targets = [ids.poll_target(sampler_id, clone) for clone in range(joined + 1)]
        found = set(texts(self._redis.smembers(keys.sampled(sampler_id))))
        for target in targets:
            found.update(texts(self._redis.zrange(keys.completed(target), -_MOST_CALLS, -1)))
        return self.of(sorted(found))

    def of(self, request_ids: Iterable[str]) -> list[Call]:
        """The known ones of these calls, in their order."""
        calls = []
        for slice_ in slices(list(request_ids), _CALLS_SLICE):
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

"""What waits, as a whole: read in slices, so that others are answered in between."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse
from typing import TypeVar, cast

import redis

from app import ids
from app.settings import EngineSettings
from app.stores.interfaces import ModelLine, Unfinished, WaitingSample
from app.stores.redis import keys
from app.stores.redis.scripts import Scripts

_SLICE = 1000
T = TypeVar("T")


class RedisBacklog:
    """See app.stores.interfaces.Backlog."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def unfinished(self, most: int) -> Unfinished:
        found = [id_.decode() for id_ in cast(list[bytes], self._redis.zrange(keys.PENDING, 0, most - 1))]
        models = list(filter(ids.is_model_id, found))
        samples = self._samples(list(filterfalse(ids.is_model_id, found)))
        queues = sorted({sample.queue for sample in samples})
        return Unfinished(self._lines(models), samples, {queue: self._sequences(queue) for queue in queues})

    def seqs(self, model_ids: Iterable[str]) -> dict[str, list[int]]:
        found = {}
        for model_id in model_ids:
            applied = cast("bytes | None", self._redis.hget(keys.model(model_id), "applied"))
            behind = f"({int(applied or -1)}"
            waiting = cast(list[bytes], self._redis.zrangebyscore(keys.journal(model_id), behind, "+inf"))
            found[model_id] = [int(seq) for seq in waiting]
        return found

    def running(self, request_ids: Sequence[str]) -> set[str]:
        with self._redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.exists(keys.lease(request_id))
            return {id_ for id_, held in zip(request_ids, pipe.execute(), strict=True) if held}

    def _lines(self, model_ids: Sequence[str]) -> list[ModelLine]:
        lines = []
        for slice_ in _slices(model_ids):
            for model_id, row in zip(slice_, self._run("lines", *slice_), strict=True):
                if row:
                    owner, queue, node, applied, waiting, running, come = row
                    where = json.loads(owner), queue.decode(), node.decode()
                    lines.append(ModelLine(model_id, *where, applied, waiting, bool(running), bool(come)))
        return lines

    def _samples(self, request_ids: Sequence[str]) -> list[WaitingSample]:
        parents = [id_.rpartition(":")[0] for id_ in request_ids]
        # All requests of a sampler are in one queue; the last of them is the least likely to have ended meanwhile.
        whose = self._places(dict(zip(parents, request_ids, strict=True)))
        pairs = zip(parents, request_ids, strict=True)
        return [WaitingSample(id_, *whose[parent]) for parent, id_ in pairs if parent in whose]

    def _places(self, requests: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """(owner, queue) of samplers, of each of which one request is given."""
        found = {}
        for slice_ in _slices(list(requests.items())):
            with self._redis.pipeline(transaction=False) as pipe:
                for sampler_id, request_id in slice_:
                    pipe.hget(keys.record("samplers", sampler_id), "owner")
                    pipe.hget(keys.PENDING_QUEUE, request_id)
                answers = pipe.execute()
            for (sampler_id, _), owner, queue in zip(slice_, answers[::2], answers[1::2], strict=True):
                if owner and queue:
                    found[sampler_id] = json.loads(owner), queue.decode()
        return found

    def _sequences(self, queue: str) -> int:
        return sum(map(int, cast(list[bytes], self._redis.hvals(keys.placed(queue)))))


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _SLICE] for start in range(0, len(items), _SLICE))

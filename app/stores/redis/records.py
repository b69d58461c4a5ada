"""Records on Redis: one hash each, and a set of the ids in every namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import redis

from app.stores.interfaces import Record
from app.stores.redis import keys
from app.stores.redis.client import read_hash, text_fields
from app.stores.redis.scripts import Scripts


class RedisRecords:
    """See app.stores.interfaces.Records."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._run = Scripts(client)

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None:
        name = keys.record(namespace, key)
        with self._redis.pipeline() as pipe:
            pipe.hset(name, items=[part for pair in fields.items() for part in pair])
            if ttl_s is not None:
                pipe.pexpire(name, int(ttl_s * 1000))
            pipe.sadd(keys.index(namespace), key)
            pipe.execute()

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("put_new", namespace, key, *flat))

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("update", namespace, key, *flat))

    def get(self, namespace: str, key: str) -> dict[str, str] | None:
        return text_fields(read_hash(self._redis, keys.record(namespace, key))) or None

    def delete(self, namespace: str, key: str) -> None:
        with self._redis.pipeline() as pipe:
            pipe.delete(keys.record(namespace, key))
            pipe.srem(keys.index(namespace), key)
            pipe.execute()

    def list(self, namespace: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Expired ids are dropped from the index on the way."""
        members = cast(set[bytes], self._redis.smembers(keys.index(namespace)))
        ids = sorted(key.decode() for key in members)
        with self._redis.pipeline(transaction=False) as pipe:
            for key in ids:
                pipe.hgetall(keys.record(namespace, key))
            found = pipe.execute()
        for key, fields in zip(ids, found, strict=True):
            if fields:
                yield key, text_fields(fields)
            else:
                self._redis.srem(keys.index(namespace), key)

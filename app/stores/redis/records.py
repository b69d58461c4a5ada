"""Records on Redis, each a hash that a sorted set lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import redis

from app.errors import NotFound
from app.settings import EngineSettings
from app.stores.pages import Book
from app.stores.redis import keys
from app.stores.redis.client import read_hash, text_fields
from app.stores.redis.scripts import Scripts
from app.stores.redis.types import Record

# Records per round trip: the server answers other clients in between, and 10,000 records are never in memory at once.
_SLICE = 500
_DEFAULTS = EngineSettings()


class RedisRecords:
    """Small flat records by namespace and id: sessions, sampling sessions, checkpoints, workers."""

    def __init__(self, client: redis.Redis, settings: EngineSettings = _DEFAULTS) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None:
        flat = [part for pair in fields.items() for part in pair]
        self._run("put", namespace, key, 0 if ttl_s is None else int(ttl_s * 1000), *flat)

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        """False when there is one already (it stays). Raises Unavailable while there is no room for another."""
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("put_new", namespace, key, *flat))

    def put_newer(self, namespace: str, key: str, version: int, fields: Record) -> bool:
        """Set a record with a field `version`; False (nothing changes) when that version or a later one is there."""
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("put_newer", namespace, key, version, *flat))

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        """Set fields of a record; False when there is none (none is made)."""
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("update", namespace, key, *flat))

    def get(self, namespace: str, key: str) -> dict[str, str] | None:
        return text_fields(read_hash(self._redis, keys.record(namespace, key))) or None

    def delete(self, namespace: str, key: str) -> None:
        self._run("delete", namespace, key)

    def delete_same(self, namespace: str, key: str, fields: Record) -> bool:
        """Delete a record that still has the `fields` that were read; False when it has changed since."""
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("delete_same", namespace, key, *flat))

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Lists the records whose id starts with `prefix`, by id, a slice at a time. Removes the ids of expired records
        from the index on the way."""
        index, after = keys.index(namespace), f"[{prefix}"
        while slice_ := _ids(self._redis, index, after, prefix):
            with self._redis.pipeline(transaction=False) as pipe:
                for key in slice_:
                    pipe.hgetall(keys.record(namespace, key))
                found = pipe.execute()
            for key, fields in zip(slice_, found, strict=True):
                if fields:
                    yield key, text_fields(fields)
                else:
                    self._redis.zrem(index, key)
            after = f"({slice_[-1]}"

    def note(self, book: Book, project: str, key: str, text: str, *, urgent: bool = False) -> None:
        """Write an entry on this hour's page of a project's book (app/stores/pages.py), if it holds none of this key.

        Raises Unavailable while there is no room, if the entry is not `urgent`.
        """
        self._run("note", book, project, key, text, "urgent" if urgent else "")

    def join(self, sampler_id: str) -> int:
        """The number of one more client of a sampling session, from 1 on. Raises NotFound for an unknown one."""
        number = int(self._run("join", sampler_id))
        if not number:
            raise NotFound(f"sampler {sampler_id[:200]!r} does not exist")
        return number

    def now(self) -> float:
        """Unix time in seconds by the server's clock, the only one that decides whether a record has expired."""
        seconds, micros = self._redis.time()
        return seconds + micros / 1e6


def _ids(client: redis.Redis, index: str, after: str, prefix: str) -> list[str]:
    last = b"[" + prefix.encode() + b"\xff"
    found = client.zrangebylex(index, after, cast(str, last), 0, _SLICE)
    return [key.decode() for key in cast(list[bytes], found)]

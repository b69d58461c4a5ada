"""Records on Redis, each a hash that a sorted set lists, and the open pages of the usage ledger and the audit log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import cast

import redis

from app.errors import NotFound
from app.settings import EngineSettings
from app.stores.interfaces.records import Record
from app.stores.pages import Book, Fields, Held, Page
from app.stores.redis import keys
from app.stores.redis.client import read_hash, text_fields
from app.stores.redis.scripts import Scripts

# Records per round trip: the server answers other clients in between, and 10,000 records are never in memory at once.
_SLICE = 500
_DEFAULTS = EngineSettings()


class RedisRecords:
    """See app.stores.interfaces.Records."""

    def __init__(self, client: redis.Redis, settings: EngineSettings = _DEFAULTS) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def put(self, namespace: str, key: str, fields: Record, *, ttl_s: float | None = None) -> None:
        flat = [part for pair in fields.items() for part in pair]
        self._run("put", namespace, key, 0 if ttl_s is None else int(ttl_s * 1000), *flat)

    def put_new(self, namespace: str, key: str, fields: Record) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("put_new", namespace, key, *flat))

    def put_newer(self, namespace: str, key: str, version: int, fields: Record) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("put_newer", namespace, key, version, *flat))

    def update(self, namespace: str, key: str, fields: Record) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("update", namespace, key, *flat))

    def get(self, namespace: str, key: str) -> dict[str, str] | None:
        return text_fields(read_hash(self._redis, keys.record(namespace, key))) or None

    def delete(self, namespace: str, key: str) -> None:
        self._run("delete", namespace, key)

    def delete_same(self, namespace: str, key: str, fields: Record) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        return bool(self._run("delete_same", namespace, key, *flat))

    def list(self, namespace: str, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Lists a namespace's records by id prefix. Removes the ids of expired records from the index on the way."""
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
        self._run("note", book, project, key, text, "urgent" if urgent else "")

    def join(self, sampler_id: str) -> int:
        number = int(self._run("join", sampler_id))
        if not number:
            raise NotFound(f"sampler {sampler_id[:200]!r} does not exist")
        return number

    def now(self) -> float:
        seconds, micros = self._redis.time()
        return seconds + micros / 1e6


def _ids(client: redis.Redis, index: str, after: str, prefix: str) -> list[str]:
    last = b"[" + prefix.encode() + b"\xff"
    found = client.zrangebylex(index, after, cast(str, last), 0, _SLICE)
    return [key.decode() for key in cast(list[bytes], found)]


class RedisPages:
    """See app.stores.pages.Pages."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def close(self, limit: int) -> list[Page]:
        return [Page.parse(name.decode()) for name in self._run("close_pages", limit)]

    def drop(self, page: Page) -> None:
        with self._redis.pipeline() as pipe:
            pipe.delete(keys.page(page))
            pipe.zrem(keys.PAGES, str(page))
            pipe.execute()

    def find(self, book: Book, projects: Iterable[str], hours: range) -> dict[Page, Fields]:
        of = set(projects)
        listed = cast(list[bytes], self._redis.zrangebyscore(keys.PAGES, hours.start, f"({hours.stop}"))
        pages = [page for name in listed if (page := Page.parse(name.decode())).book == book and page.project in of]
        return {page: self.fields(page) for page in pages}

    def fields(self, page: Page) -> Fields:
        return text_fields(read_hash(self._redis, keys.page(page)))

    def measured(self) -> float | None:
        found = cast(bytes | None, self._redis.get(keys.STORAGE_MEASURED))
        return None if found is None else float(found)

    def measure(self, before: float | None, now: float, held: Iterable[Held]) -> bool:
        # As text: numbers in a script are exact only up to 2^53, which is ten terabytes for a quarter of an hour.
        rows = [[each.project, each.base_model, each.hour, str(each.byte_seconds)] for each in held]
        return bool(self._run("measure_storage", "" if before is None else repr(before), repr(now), json.dumps(rows)))

"""Pages on Redis: a hash each, and a sorted set of them by their hour."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import cast

import redis

from app.settings import EngineSettings
from app.stores.pages import Book, Fields, Held, Page
from app.stores.redis import keys
from app.stores.redis.client import read_hash, text_fields
from app.stores.redis.scripts import Scripts


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
        # As text: a script's own numbers are exact only up to 2^53, ten terabytes for a quarter of an hour.
        rows = [[each.project, each.base_model, each.hour, str(each.byte_seconds)] for each in held]
        return bool(self._run("measure_storage", "" if before is None else repr(before), repr(now), json.dumps(rows)))

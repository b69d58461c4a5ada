"""Open pages of usage and of the audit log on Redis, and whole ledgers: these pages and those in the object store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import redis

from app.settings import EngineSettings
from app.stores.pages import Fields, Ledger, LedgerPage, PageFiles, StorageUse
from app.stores.redis import keys
from app.stores.redis.client import Scripts, read_hash, text_fields, texts


class RedisPages:
    """The pages at the state server. All hours are those of its clock."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def close(self, limit: int) -> list[LedgerPage]:
        """Closes the pages of past hours for good. Returns at most this many of the closed pages."""
        return [LedgerPage.parse(name) for name in texts(self._run("close_pages", limit))]

    def drop(self, page: LedgerPage) -> None:
        """Deletes a closed page that has been stored elsewhere."""
        with self._redis.pipeline() as pipe:
            pipe.delete(keys.page(page))
            pipe.zrem(keys.PAGES, str(page))
            pipe.execute()

    def find(self, ledger: Ledger, projects: Iterable[str], hours: range) -> dict[LedgerPage, Fields]:
        """The existing pages of these projects and hours."""
        of = set(projects)
        listed = texts(self._redis.zrangebyscore(keys.PAGES, hours.start, f"({hours.stop}"))
        pages = map(LedgerPage.parse, listed)
        return {page: self.fields(page) for page in pages if page.ledger == ledger and page.project in of}

    def fields(self, page: LedgerPage) -> Fields:
        """The fields of a page; empty for a page that does not exist."""
        return text_fields(read_hash(self._redis, keys.page(page)))

    def this_month(self, project: str) -> dict[tuple[str, str], float]:
        """The project's usage in this calendar month (UTC): amounts by kind and base model."""
        found: list[bytes] = self._run("month_usage", project)
        names = [tuple(name.decode().split(" ", 1)) for name in found[::2]]
        return {(kind, base): float(amount) for (kind, base), amount in zip(names, found[1::2], strict=True)}

    def refill_month(
        self, project: str, hours: range, stored: Iterable[int], amounts: Mapping[tuple[str, str], int]
    ) -> bool:
        """Raises the usage of a month to the sum of its pages: those of the `stored` hours, which have these `amounts`,
        and those that are still at the state server. Returns False if nothing was missing."""
        by_name = {f"{kind} {base}": amount for (kind, base), amount in amounts.items()}
        args = project, hours.start, hours.stop, json.dumps(sorted(stored)), json.dumps(by_name)
        return bool(self._run("refill_month", *args))

    def measured(self) -> float | None:
        """The time of the last measurement of the checkpoints' sizes, in unix seconds; None if there was none."""
        found = cast(bytes | None, self._redis.get(keys.STORAGE_MEASURED))
        return None if found is None else float(found)

    def measure(self, before: float | None, now: float, storage: Iterable[StorageUse]) -> bool:
        """Counts the bytes held between two measurements. Returns False, without a change, when `before` was not the
        last measurement."""
        # As text: a script's own numbers are exact only up to 2^53, ten terabytes for a quarter of an hour.
        rows = [[each.project, each.base_model, each.hour, str(each.byte_seconds)] for each in storage]
        return bool(self._run("measure_storage", "" if before is None else repr(before), repr(now), json.dumps(rows)))


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The pages of both ledgers: those still at the state server, and those in the object store."""

    pages: RedisPages
    files: PageFiles

    def read(self, ledger: Ledger, projects: Iterable[str], hours: range) -> dict[LedgerPage, Fields]:
        """Reads every page once. The state server is read first, because otherwise a page that moves meanwhile would be
        missed. If a page is in both places, because it is moving or the state server was set back, the page in the
        object store counts. Raises Unavailable."""
        of = list(projects)
        found = self.pages.find(ledger, of, hours)
        for project in of:
            found.update(self.files.find(ledger, project, hours))
        return found

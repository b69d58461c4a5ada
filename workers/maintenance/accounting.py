"""Accounting of storage: measures the bytes of checkpoints, and stores the pages of past hours."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator

from app.domain.records import Checkpoint
from app.domain.results import HOUR_S
from app.stores.pages import PageFiles, StorageUse
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords, load

log = logging.getLogger(__name__)
# A checkpoint that comes or goes counts within this time; ten thousand are read in a third of a second.
_MEASURED_S = 300.0
# A gap longer than this between two measurements means that nothing ran.
_LONGEST_S = 86_400.0
# Pages in one round: between two rounds the lead may pass to another worker.
_PAGES_BATCH = 256


class Accounting:
    """Accounting of storage. Every step may be repeated: a measurement counts once, and a page is stored once."""

    def __init__(self, pages: RedisPages, files: PageFiles, records: RedisRecords) -> None:
        self._pages, self._files, self._records = pages, files, records
        self._due, self._hour = 0.0, -1

    def sweep(self) -> None:
        """Runs one round. Raises Unavailable; the pages to be stored then stay at the state server."""
        self._measure()
        for page in self._pages.close(_PAGES_BATCH):
            fields = self._pages.fields(page)
            if fields:  # else another leader has stored it
                self._files.add(page, fields)
            self._pages.drop(page)

    def _measure(self) -> None:
        """Measures every few minutes, and before the pages of an hour are closed."""
        now = self._records.now()
        hour = int(now // HOUR_S)
        if hour == self._hour and time.monotonic() < self._due:
            return
        before = self._pages.measured()
        now = now if before is None else max(before, now)  # a clock that was set back must not count a time twice
        storage = [] if before is None else list(_storage_use(self._sizes(now), max(before, now - _LONGEST_S), now))
        self._pages.measure(before, now, storage)
        self._due, self._hour = time.monotonic() + _MEASURED_S, hour

    def _sizes(self, now: float) -> Counter[tuple[str, str]]:
        """Bytes by project and base model. A checkpoint that cannot be read counts nothing."""
        sizes: Counter[tuple[str, str]] = Counter()
        for path, fields in self._records.list(Checkpoint.namespace):
            try:
                checkpoint = load(Checkpoint, fields)
                if not checkpoint.is_expired(now):
                    sizes[checkpoint.owner, checkpoint.base_model] += checkpoint.size_bytes
            except (TypeError, ValueError):
                log.warning("a checkpoint cannot be read, and its storage is not counted: %s", path)
        return sizes


def _storage_use(sizes: Counter[tuple[str, str]], begin: float, end: float) -> Iterator[StorageUse]:
    """Splits the time from `begin` to `end` by hours, as if these sizes had been there all the time."""
    for hour in range(int(begin // HOUR_S), int(end // HOUR_S) + 1):
        seconds = min(end, (hour + 1) * HOUR_S) - max(begin, hour * HOUR_S)
        for (project, base_model), size in sizes.items():
            if seconds > 0 and size:
                yield StorageUse(project, base_model, hour, round(size * seconds))

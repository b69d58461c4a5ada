"""Adapter files on a sampler's machine: from the shared-memory transfer, else from the object store."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.domain.records import ShmTransfer
from app.errors import NotFound, ServerOpError, Unavailable
from app.stores.disk import Disk
from app.stores.objects.base import ObjectStore
from app.stores.redis.records import RedisRecords
from workers.checkpoints import transfer
from workers.checkpoints.shm_transfer import ShmFolder

log = logging.getLogger(__name__)
# An upload that continues behind a commit has ended by then. A longer upload needs more than a short wait.
_PATIENCE_S = 3.0
_POLL_S = 0.05
# Thousands of requests may wait for the same files, and perhaps no trainer reads its queue. The record of the demand
# for a trainer lasts longer.
_ASK_AGAIN_S = 30.0


@dataclass(slots=True)
class Missing:
    """Files that were missing, since when, and when their owner was last requested (time.monotonic())."""

    since: float
    asked: float = -math.inf


class AdapterFiles:
    """Adapter files on this machine, by object-store prefix. Files in use stay. Of the others the last used stay, while
    all files together have at most `most_bytes`, and the disk of `cache` has room for new ones.

    With `in_place` the files in shared memory are used there, and kept there as long as they are in use. That suits all
    weights of a model, whose copy would take seconds. Otherwise they are copied, and leave room there for others.

    `request_owner(prefix)` is called when some trainer has to own the adapter's model, to upload the adapter or rebuild
    it: every `_ASK_AGAIN_S` seconds at most, as long as requests for the adapter come.
    """

    def __init__(
        self,
        store: ObjectStore,
        records: RedisRecords,
        transfers: ShmFolder,
        cache: Disk,
        most_bytes: int,
        request_owner: Callable[[str], None],
        *,
        in_place: bool = False,
    ) -> None:
        self.in_place = in_place
        self._store, self._records, self._transfers = store, records, transfers
        self._cache, self._most_bytes, self._request_owner = cache, most_bytes, request_owner
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of the adapter files on this machine by prefix, the least recently used first."""
        self._in_use: Counter[str] = Counter()
        self._readings: dict[str, tuple[Path, ExitStack]] = {}
        """The folders in shared memory that are in use, each with what keeps it there."""
        self._fetching: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._missing: dict[str, Missing] = {}

    @contextmanager
    def use(self, prefix: str) -> Iterator[Path]:
        """Yields the folder of the files and keeps it for as long as the block; see `acquire`."""
        folder = self.acquire(prefix)
        try:
            yield folder
        finally:
            self.release(prefix)

    def acquire(self, prefix: str) -> Path:
        """Returns the folder of the files and keeps it until `release`. Raises ServerOpError when they are gone or
        damaged, and Unavailable when they cannot be read now."""
        with self._lock:
            self._in_use[prefix] += 1
            fetching = self._fetching[prefix]
        try:
            with fetching:
                folder = self._fetch(prefix)
        except BaseException:
            self.release(prefix)
            raise
        with self._lock:
            if prefix in self._readings:
                return folder
            if prefix not in self._sizes:
                self._sizes[prefix] = sum(path.stat().st_size for path in folder.iterdir())
            self._sizes.move_to_end(prefix)
        return folder

    def release(self, prefix: str) -> None:
        with self._lock:
            self._in_use[prefix] -= 1
            if not self._in_use[prefix]:
                del self._in_use[prefix], self._fetching[prefix]
                if prefix in self._readings:
                    self._readings.pop(prefix)[1].close()
            self._forget_unused(lambda: sum(self._sizes.values()) <= self._most_bytes)

    def _make_room(self, size: int) -> None:
        """Raises Unavailable when the disk has no room for `size` bytes, even without the unused files."""
        with self._lock:
            self._forget_unused(lambda: not self._cache.shortage(size))
        self._cache.check(size)

    def _fetch(self, prefix: str) -> Path:
        """Fetches the files. If they are missing and their shared-memory transfer is on record, waits for them or puts
        the request off. The record is deleted when the upload has ended, so without a record there is one last try."""
        on_record = True
        while True:
            try:
                folder = self._shared(prefix) or self._copied(prefix)
            except NotFound:
                if not on_record:
                    self._missing.pop(prefix, None)
                    raise ServerOpError("the adapter's files are gone; save the weights again") from None
            else:
                self._missing.pop(prefix, None)
                return folder
            on_record = self._records.get(ShmTransfer.namespace, prefix) is not None
            if on_record:
                self._wait_for(prefix)

    def _shared(self, prefix: str) -> Path | None:
        if not self.in_place:
            return None
        if prefix not in self._readings:
            with ExitStack() as reading:
                folder = reading.enter_context(self._transfers.reading(prefix))
                if folder is None:
                    return None
                self._readings[prefix] = folder, reading.pop_all()
        return self._readings[prefix][0]

    def _copied(self, prefix: str) -> Path:
        return transfer.fetch(self._store, prefix, self._cache.folder, self._transfers.take, self._make_room)

    def _wait_for(self, prefix: str) -> None:
        now = time.monotonic()
        missing = self._missing.setdefault(prefix, Missing(now))
        if now - missing.since > _PATIENCE_S:
            if now - missing.asked > _ASK_AGAIN_S:
                self._request_owner(prefix)
                missing.asked = now
            raise Unavailable(f"{prefix} is not in the object store yet")
        time.sleep(_POLL_S)

    def _forget_unused(self, is_enough: Callable[[], bool]) -> None:
        """Deletes unused files, the least recently used first, until it is enough."""
        for prefix in [prefix for prefix in self._sizes if not self._in_use[prefix]]:
            if is_enough():
                return
            try:
                transfer.forget(prefix, self._cache.folder)
            except BlockingIOError:  # a download has the same lock; all requests would wait for it
                continue
            except OSError as error:  # renaming fails on a full disk too, and a finished request must keep its result
                log.warning("could not delete unused adapter files: %s", error)
                return
            del self._sizes[prefix]

"""Adapters of a sampler's engine: loaded on first use, run in turns, their files brought to this machine.

Only a limited number of different adapters run at a time; the others take turns. The project that had the least service
goes first (workers/process/fair_queue.py), and within a project the adapter that came first. With more adapters
admitted than the engine holds in a batch, the engine would swap adapters for every request. So an admitted adapter
takes along all requests that wait for it, and, as long as no other adapter waits, all new ones. Once others wait, later
requests for it wait behind them: the adapter leaves when its running requests have ended, and gets another turn later.

Files come from the shared-memory transfer, else from the object store.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.domain.records import ShmTransfer
from app.errors import NotFound, ServerOpError, Unavailable
from app.stores.disk import Disk
from app.stores.objects.base import ObjectStore
from app.stores.redis.records import RedisRecords
from workers.backends.sampling.base import Aborted, RequestHandle, SamplerBackend
from workers.checkpoints import transfer
from workers.checkpoints.shm_transfer import ShmFolder
from workers.process import telemetry
from workers.process.fair_queue import FairQueue

log = logging.getLogger(__name__)
# An upload that continues behind a commit has ended by then. A longer upload needs more than a short wait.
_PATIENCE_S = 3.0
_POLL_S = 0.05
# Thousands of requests may wait for the same files, and perhaps no trainer reads its queue. The record of the demand
# for a trainer lasts longer.
_ASK_AGAIN_S = 30.0


class Adapters:
    """Loaded adapters by object-store prefix, which is their id: a prefix always means the same weights.

    `most` adapters stay loaded, at least as many as `scheduler` lets run at a time. An evicted adapter leaves its files
    to `files`, and is loaded again when it is requested. `gpu_turn` waits until the sampler may use its GPUs, as long
    as its block."""

    def __init__(
        self,
        backend: SamplerBackend,
        files: AdapterFiles,
        scheduler: AdapterScheduler,
        most: int,
        gpu_turn: Callable[[RequestHandle], AbstractContextManager[object]],
    ) -> None:
        self._backend, self._files, self._scheduler, self._most = backend, files, scheduler, most
        self._gpu_turn = gpu_turn
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._loading: dict[str, threading.Lock] = {}

    @contextmanager
    def use(self, prefix: str, project: str, handle: RequestHandle) -> Iterator[str | None]:
        """Yields the adapter's id, for a request of `project`: in the adapter's turn, and loaded for as long as the
        block. Yields None for the base model (an empty prefix).

        Raises ServerOpError when its files are gone or damaged, or memory is too small for it alone. Raises Unavailable
        when they cannot be read now, or others have the memory. A request that waits for files does not delay the turns
        of others. Raises Aborted when `handle` is aborted before a turn."""
        if not prefix:
            with self._used(""):
                yield None
            return
        turn = self._scheduler.turn(prefix, project, handle)
        with self._files.use(prefix) as folder, turn, self._loaded_from(folder, prefix, handle):
            yield prefix

    @contextmanager
    def _loaded_from(self, folder: Path, prefix: str, handle: RequestHandle) -> Iterator[None]:
        try:
            with self._used(prefix) as loading:
                with self._gpu_turn(handle), loading:
                    self._load(prefix, folder)
                if self._files.in_place:  # else a model's weights would stay in shared memory beside their successor
                    self._evict_unused()
                yield
        finally:
            self._evict_unused()

    @contextmanager
    def _used(self, prefix: str) -> Iterator[threading.Lock]:
        """Counts a request for as long as the block, and yields the loading lock of its adapter."""
        with self._lock:
            self._in_use[prefix] += 1
            loading = self._loading.setdefault(prefix, threading.Lock())
        try:
            yield loading
        finally:
            self._leave(prefix)

    def _leave(self, prefix: str) -> None:
        with self._lock:
            self._in_use[prefix] -= 1
            if not self._in_use[prefix] and prefix not in self._loaded:
                del self._loading[prefix], self._in_use[prefix]

    def _load(self, prefix: str, folder: Path) -> None:
        with self._lock:
            if prefix in self._loaded:
                self._loaded.move_to_end(prefix)
                telemetry.ADAPTER_USES.labels("hit").inc()
                return
        if not self._fits(prefix, folder):
            self._evict_unused(0)  # they may have the memory that is missing
            self._load_again(prefix, folder)
        self._files.acquire(prefix)
        with self._lock:
            self._loaded[prefix] = None
            telemetry.ADAPTERS.set(len(self._loaded))
        telemetry.ADAPTER_USES.labels("miss").inc()

    def _fits(self, prefix: str, folder: Path) -> bool:
        """Loads the adapter. Returns False, and keeps no tensor of it, when memory is too small."""
        try:
            self._backend.load(prefix, folder)
        except Unavailable:
            return False
        return True

    def _load_again(self, prefix: str, folder: Path) -> None:
        """Loads the adapter after unused ones have left. Raises ServerOpError if memory is too small for it alone."""
        alone = self._is_alone(prefix)
        try:
            self._backend.load(prefix, folder)
        except Unavailable as error:
            if not (alone and self._is_alone(prefix)):
                raise
            raise ServerOpError(
                f"memory is too small for {prefix}, though no other adapter is loaded and no other request runs; train "
                "an adapter of a lower rank, or ask the operator for a sampler with more memory"
            ) from error

    def _is_alone(self, prefix: str) -> bool:
        """True if no other adapter is loaded, and no request for another one or for the base model runs."""
        with self._lock:
            return not self._loaded and self._in_use.keys() == {prefix}

    def _evict_unused(self, most: int | None = None) -> None:
        """Evicts unused adapters beyond `most` loaded ones, without the lock: a busy engine evicts one only between two
        steps. A request for that adapter waits meanwhile, and then loads it again."""
        while (prefix := self._take_surplus(self._most if most is None else most)) is not None:
            try:
                self._backend.evict(prefix)
                self._files.release(prefix)
            finally:
                self._loading[prefix].release()
                self._leave(prefix)

    def _take_surplus(self, most: int) -> str | None:
        """Removes an unused adapter from those that are loaded, if they are over `most`, and takes its loading lock.

        The lock is free: only a request that uses the adapter holds it."""
        with self._lock:
            unused = (prefix for prefix in self._loaded if not self._in_use[prefix])
            prefix = next(unused, None) if len(self._loaded) > most else None
            if prefix is not None:
                self._loading[prefix].acquire()
                self._in_use[prefix] += 1
                del self._loaded[prefix]
                telemetry.ADAPTERS.set(len(self._loaded))
            return prefix


class AdapterScheduler:
    """The turns of adapters. Safe from any thread. Batch admission decides which project is charged
    (workers/sample/admission.py)."""

    def __init__(self, most: int, fair_queue: FairQueue) -> None:
        self._most, self._fair_queue = most, fair_queue
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[tuple[str, str], list[threading.Event]] = {}
        """Waiting requests by (project, adapter), in the order of the first request of each."""

    @contextmanager
    def turn(self, adapter_id: str, project: str, handle: RequestHandle) -> Iterator[None]:
        """Waits for the adapter's turn, for a request of `project`; the turn lasts as long as the block. Raises Aborted
        if `handle` is aborted before."""
        self._wait(adapter_id, project, handle)
        try:
            yield
        finally:
            self._leave(adapter_id)

    def _wait(self, adapter_id: str, project: str, handle: RequestHandle) -> None:
        admitted, group = threading.Event(), (project, adapter_id)
        with self._lock:
            self._waiting.setdefault(group, []).append(admitted)
            self._admit()
        handle.on_abort(admitted.set)
        admitted.wait()
        with self._lock:
            still_waiting = self._waiting.get(group, [])
            if admitted in still_waiting:
                still_waiting.remove(admitted)
                if not still_waiting:
                    del self._waiting[group]
                    self._admit()
                raise Aborted(f"the request was stopped before the turn of {adapter_id}")

    def _leave(self, adapter_id: str) -> None:
        with self._lock:
            self._running[adapter_id] -= 1
            if not self._running[adapter_id]:
                del self._running[adapter_id]
            self._admit()

    def _admit(self) -> None:
        """Admits the requests whose turn it is, as long as there is room for their adapters."""
        for group in sorted(self._waiting, key=lambda group: self._fair_queue.virtual_time(group[0])):
            adapter_id = group[1]
            if adapter_id not in self._running and len(self._running) >= self._most:
                return
            for admitted in self._waiting.pop(group):
                self._running[adapter_id] += 1
                admitted.set()


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

"""Adapters of a sampler's engine: loaded on first use, and run in turns."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from app.errors import ServerOpError, Unavailable
from workers.backends.sampling.base import Aborted, RequestHandle, SamplerBackend
from workers.process import telemetry
from workers.process.fair_queue import FairQueue
from workers.sample.adapter_files import AdapterFiles


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
    (workers/sample/admission.py).

    Only `most` different adapters run at a time; the others take turns. The project that had the least service goes
    first (workers/process/fair_queue.py), and within a project the adapter that came first. With more adapters admitted
    than the engine holds in a batch, the engine would swap adapters for every request. So an admitted adapter takes
    along all requests that wait for it, and, as long as no other adapter waits, all new ones. Once others wait, later
    requests for it wait behind them: the adapter leaves when its running requests have ended, and gets another turn
    later.
    """

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

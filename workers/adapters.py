"""Adapters a sampler's engine holds: loaded on first use, the longest unused one evicted when there are too many."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.adapter_files import AdapterFiles
from workers.adapter_turns import AdapterTurns
from workers.sampling.base import SamplerBackend
from workers.sampling.watch import Watch


class Adapters:
    """Loaded adapters by object-store prefix, which is their id: a prefix always means the same weights.

    `most` stay loaded, at least as many as `turns` lets run at a time; one that is evicted leaves its files to
    `files`, and is loaded again when it is asked for.
    """

    def __init__(self, backend: SamplerBackend, files: AdapterFiles, turns: AdapterTurns, most: int) -> None:
        self._backend, self._files, self._turns, self._most = backend, files, turns, most
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._loading: dict[str, threading.Lock] = {}

    @contextmanager
    def use(self, prefix: str, project: str, watch: Watch) -> Iterator[str | None]:
        """The adapter's id, in its turn and loaded for as long as the block, for a request of `project`; None for the
        base (an empty prefix).

        Raises ServerOpError when its files are gone or damaged, and Unavailable when they are not to be had now. What
        has to wait for its files keeps nobody else from his turn. Raises Aborted when `watch` is before its own.
        """
        if not prefix:
            yield None
            return
        turn = self._turns.turn(prefix, project, watch)
        with self._files.use(prefix) as folder, turn, self._loaded_from(folder, prefix):
            yield prefix

    @contextmanager
    def _loaded_from(self, folder: Path, prefix: str) -> Iterator[None]:
        with self._lock:
            self._in_use[prefix] += 1
            loading = self._loading.setdefault(prefix, threading.Lock())
        try:
            with loading:
                self._load(prefix, folder)
            yield
        finally:
            with self._lock:
                self._in_use[prefix] -= 1
            self._evict_unused()

    def _load(self, prefix: str, folder: Path) -> None:
        with self._lock:
            if prefix in self._loaded:
                self._loaded.move_to_end(prefix)
                return
        self._backend.load(prefix, folder)
        self._files.hold(prefix)
        with self._lock:
            self._loaded[prefix] = None

    def _evict_unused(self) -> None:
        with self._lock:
            surplus = len(self._loaded) - self._most
            unused = [prefix for prefix in self._loaded if not self._in_use[prefix]][: max(surplus, 0)]
            for prefix in unused:
                del self._loaded[prefix], self._loading[prefix], self._in_use[prefix]
                self._backend.evict(prefix)
                self._files.let_go(prefix)

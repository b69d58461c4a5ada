"""Adapters a sampler holds: fetched and loaded on first use, the longest unused one evicted when there are too many."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import NotFound, ServerOpError
from app.stores.interfaces import ObjectStore
from workers import checkpoints
from workers.sampling.base import SamplerBackend


class Adapters:
    """Loaded adapters by object-store prefix, which is their id: a prefix always means the same weights.

    One that is in use is never evicted, so `most` may be passed for as long as requests need it.
    """

    def __init__(self, backend: SamplerBackend, store: ObjectStore, cache_dir: Path, most: int) -> None:
        self._backend, self._store, self._cache_dir, self._most = backend, store, cache_dir, most
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._loading: dict[str, threading.Lock] = {}

    @contextmanager
    def use(self, prefix: str) -> Iterator[str | None]:
        """The adapter's id, loaded for as long as the block runs; None for the base (an empty prefix)."""
        if not prefix:
            yield None
            return
        with self._lock:
            self._in_use[prefix] += 1
            loading = self._loading.setdefault(prefix, threading.Lock())
        try:
            with loading:
                self._load(prefix)
            yield prefix
        finally:
            with self._lock:
                self._in_use[prefix] -= 1
            self._evict_unused()

    def _load(self, prefix: str) -> None:
        with self._lock:
            if prefix in self._loaded:
                self._loaded.move_to_end(prefix)
                return
        try:
            folder = checkpoints.fetch(self._store, prefix, self._cache_dir)
        except NotFound:
            raise ServerOpError("the adapter's files are gone from the object store; save the weights again") from None
        self._backend.load(prefix, folder)
        with self._lock:
            self._loaded[prefix] = None

    def _evict_unused(self) -> None:
        with self._lock:
            surplus = len(self._loaded) - self._most
            unused = [prefix for prefix in self._loaded if not self._in_use[prefix]][: max(surplus, 0)]
            for prefix in unused:
                del self._loaded[prefix], self._loading[prefix], self._in_use[prefix]
                self._backend.evict(prefix)
                checkpoints.forget(prefix, self._cache_dir)

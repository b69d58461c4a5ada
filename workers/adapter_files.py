"""Adapters' files on a sampler's machine: from where they were handed over, else from the object store."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.domain.records import Handover
from app.errors import NotFound, ServerOpError, Unavailable
from app.stores.interfaces import ObjectStore, Records
from workers import checkpoints
from workers.handover.folder import HandoverFolder

log = logging.getLogger(__name__)
# An upload that goes on behind a commit is through by then; what takes longer needs more than a moment's patience.
_PATIENCE_S = 3.0
_LOOK_AGAIN_S = 0.05


class AdapterFiles:
    """By object-store prefix. Those in use stay; of the others `most_bytes`, those used last.

    `own_its_model(prefix)` is called when somebody has to own the adapter's model, to upload it or make it again.
    """

    def __init__(
        self,
        store: ObjectStore,
        index: Records,
        nearby: HandoverFolder,
        cache_dir: Path,
        most_bytes: int,
        own_its_model: Callable[[str], None],
    ) -> None:
        self._store, self._index, self._nearby = store, index, nearby
        self._cache_dir, self._most_bytes, self._own_its_model = cache_dir, most_bytes, own_its_model
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """What is here, the longest unused first."""
        self._in_use: Counter[str] = Counter()
        self._fetching: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._missed: dict[str, float] = {}

    @contextmanager
    def use(self, prefix: str) -> Iterator[Path]:
        """The files, for as long as the block; see `hold`."""
        folder = self.hold(prefix)
        try:
            yield folder
        finally:
            self.let_go(prefix)

    def hold(self, prefix: str) -> Path:
        """Raises ServerOpError when they are gone or damaged, and Unavailable when they are not to be had now."""
        with self._lock:
            self._in_use[prefix] += 1
            fetching = self._fetching[prefix]
        try:
            with fetching:
                folder = self._fetch(prefix)
        except BaseException:
            self.let_go(prefix)
            raise
        with self._lock:
            if prefix not in self._sizes:
                self._sizes[prefix] = sum(path.stat().st_size for path in folder.iterdir())
            self._sizes.move_to_end(prefix)
        return folder

    def let_go(self, prefix: str) -> None:
        with self._lock:
            self._in_use[prefix] -= 1
            if not self._in_use[prefix]:
                del self._in_use[prefix], self._fetching[prefix]
            self._forget_unused()

    def _fetch(self, prefix: str) -> Path:
        """One that is not there and on record as handed over is waited for, or put off. The record goes when the upload
        has ended, so without one there is a last look."""
        on_record = True
        while True:
            try:
                folder = checkpoints.fetch(self._store, prefix, self._cache_dir, self._nearby.take)
            except NotFound:
                if not on_record:
                    raise ServerOpError("the adapter's files are gone; save the weights again") from None
            else:
                self._missed.pop(prefix, None)
                return folder
            on_record = self._index.get(Handover.namespace, prefix) is not None
            if on_record:
                self._wait_for(prefix)

    def _wait_for(self, prefix: str) -> None:
        since = self._missed.setdefault(prefix, time.monotonic())
        if time.monotonic() - since > _PATIENCE_S:
            self._own_its_model(prefix)
            raise Unavailable(f"{prefix} is not in the object store yet")
        time.sleep(_LOOK_AGAIN_S)

    def _forget_unused(self) -> None:
        surplus = sum(self._sizes.values()) - self._most_bytes
        for prefix in [prefix for prefix in self._sizes if not self._in_use[prefix]]:
            if surplus <= 0:
                return
            try:
                checkpoints.forget(prefix, self._cache_dir)
            except OSError as error:  # a full disk takes no renaming either, and who has a result must not lose it
                log.warning("files that nobody uses stay for now: %s", error)
                return
            surplus -= self._sizes.pop(prefix)

"""The watches of the sampling requests that run here: who stops one knows only its request id."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from workers.sampling.watch import Watch


class Watches:
    """`abort` may come from any thread, for any request of any worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, set[Watch]] = defaultdict(set)

    @contextmanager
    def watching(self, request_id: str) -> Iterator[Watch]:
        """A watch that is aborted if the request is while the block runs. A doubled doorbell has one of its own."""
        watch = Watch()
        with self._lock:
            self._running[request_id].add(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._running[request_id].discard(watch)
                if not self._running[request_id]:
                    del self._running[request_id]

    def abort(self, request_id: str) -> None:
        """Stop the request, if it runs here."""
        with self._lock:
            watches = tuple(self._running.get(request_id, ()))
        for watch in watches:
            watch.abort()

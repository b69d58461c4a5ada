"""Whose adapter runs: at most so many different ones at a time, the others in the order in which they came.

An engine that holds so many in a batch would swap them for every request were more let in. So an adapter that is let in
takes along all that waits for it, and as long as nobody else waits, all that comes. Once others do wait, what comes for
it later waits behind them: it leaves when what is in has ended, and comes round again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from workers.sampling.watch import Aborted, Watch


class AdapterTurns:
    """Safe from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[threading.Event]] = {}
        """By adapter, in the order in which the first of each came."""

    @contextmanager
    def turn(self, adapter_id: str, watch: Watch) -> Iterator[None]:
        """Waits until the adapter may run, which it does as long as the block. Raises Aborted if `watch` is before."""
        self._wait(adapter_id, watch)
        try:
            yield
        finally:
            self._leave(adapter_id)

    def _wait(self, adapter_id: str, watch: Watch) -> None:
        let_in = threading.Event()
        with self._lock:
            self._waiting.setdefault(adapter_id, []).append(let_in)
            self._let_in()
        watch.on_abort(let_in.set)
        let_in.wait()
        with self._lock:
            still_waiting = self._waiting.get(adapter_id, [])
            if let_in in still_waiting:
                still_waiting.remove(let_in)
                if not still_waiting:
                    del self._waiting[adapter_id]
                    self._let_in()
                raise Aborted(f"the request was stopped before the turn of {adapter_id}")

    def _leave(self, adapter_id: str) -> None:
        with self._lock:
            self._running[adapter_id] -= 1
            if not self._running[adapter_id]:
                del self._running[adapter_id]
            self._let_in()

    def _let_in(self) -> None:
        """Those that came first, as long as there is room for their adapters."""
        for adapter_id in list(self._waiting):
            if adapter_id not in self._running and len(self._running) >= self._most:
                return
            for let_in in self._waiting.pop(adapter_id):
                self._running[adapter_id] += 1
                let_in.set()

"""Whose adapter runs: at most so many different ones at a time, the others in turns. First are those of the project
that had the least (workers/shares.py), and of a project's those that came first.

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
from workers.shares import Shares


class AdapterTurns:
    """Safe from any thread. Who is charged for what runs here is the gate's to say (workers/gate.py)."""

    def __init__(self, most: int, shares: Shares) -> None:
        self._most, self._shares = most, shares
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[tuple[str, str], list[threading.Event]] = {}
        """By project and adapter, in the order in which the first of each came."""

    @contextmanager
    def turn(self, adapter_id: str, project: str, watch: Watch) -> Iterator[None]:
        """Waits until the adapter may run, which it does as long as the block, for a request of `project`. Raises
        Aborted if `watch` is before."""
        self._wait(adapter_id, project, watch)
        try:
            yield
        finally:
            self._leave(adapter_id)

    def _wait(self, adapter_id: str, project: str, watch: Watch) -> None:
        let_in, group = threading.Event(), (project, adapter_id)
        with self._lock:
            self._waiting.setdefault(group, []).append(let_in)
            self._let_in()
        watch.on_abort(let_in.set)
        let_in.wait()
        with self._lock:
            still_waiting = self._waiting.get(group, [])
            if let_in in still_waiting:
                still_waiting.remove(let_in)
                if not still_waiting:
                    del self._waiting[group]
                    self._let_in()
                raise Aborted(f"the request was stopped before the turn of {adapter_id}")

    def _leave(self, adapter_id: str) -> None:
        with self._lock:
            self._running[adapter_id] -= 1
            if not self._running[adapter_id]:
                del self._running[adapter_id]
            self._let_in()

    def _let_in(self) -> None:
        """Those whose turn it is, as long as there is room for their adapters."""
        for group in sorted(self._waiting, key=lambda group: self._shares.place(group[0])):
            adapter_id = group[1]
            if adapter_id not in self._running and len(self._running) >= self._most:
                return
            for let_in in self._waiting.pop(group):
                self._running[adapter_id] += 1
                let_in.set()

"""Stand-ins for the threads behind a trainer: the same work at times the test sets, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from workers.train.committer import BackgroundSaves

Item = TypeVar("Item")


class Background:
    """Background work of one process.

    While it `lags`, its work waits for `catch_up`; otherwise the work is done immediately. Saves are always late.
    `writes` is called with the model whose save is about to be written.
    """

    def __init__(self, writes: Callable[[str], None]) -> None:
        self.lags = False
        self.background_saves = LateSaves(writes)
        self._workers: list[Work] = []

    def coalescing_worker(self, name: str, work: Callable[[str, Item], None]) -> Work[Item]:
        """As workers.checkpoints.coalescing.CoalescingWorker."""
        self._workers.append(Work(self, work))
        return self._workers[-1]

    def catch_up(self) -> None:
        """Does all pending work: writes come before the uploads they lead to."""
        self.background_saves.write()
        for worker in self._workers:
            worker.work_off()


class LateSaves(BackgroundSaves):
    """Saves that are written as late as possible: when there is nothing else to do."""

    def __init__(self, writes: Callable[[str], None]) -> None:
        super().__init__()
        self._writes = writes
        self._unwritten: dict[str, Callable[[], None]] = {}

    def spawn(self, model_id: str, run: Callable[[], None]) -> None:
        self._unwritten[model_id] = run

    def await_any(self, seconds: float) -> None:
        self.write(*list(self._unwritten)[:1])

    def finish(self, model_id: str, seconds: float) -> None:
        self.write(model_id)

    def write(self, *model_ids: str) -> None:
        """Writes the saves of these models, or all."""
        for model_id in model_ids or list(self._unwritten):
            if model_id in self._unwritten:
                self._writes(model_id)
                self._unwritten.pop(model_id)()


class Work(Generic[Item]):
    """Keeps the newest item of a key. A failed item waits for the next time."""

    def __init__(self, background: Background, work: Callable[[str, Item], None]) -> None:
        self._background, self._work = background, work
        self._waiting: dict[str, Item] = {}

    def put(self, key: str, item: Item, *, at_once: bool = False) -> None:
        self._waiting[key] = item
        if not self._background.lags:
            self.work_off()

    def ready(self, key: str) -> bool:
        return key not in self._waiting

    def item(self, key: str) -> Item | None:
        return None

    def finish(self, key: str, timeout_s: float) -> None:
        self.work_off()

    def drop(self, key: str) -> None:
        self._waiting.pop(key, None)

    def close(self, timeout_s: float) -> None:
        self._waiting.clear()

    def work_off(self) -> None:
        for key in list(self._waiting):
            item = self._waiting.pop(key)
            try:
                self._work(key, item)
            except Exception:
                self._waiting.setdefault(key, item)

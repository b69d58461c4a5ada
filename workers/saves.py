"""Saves that are being written, each in a thread of its own, while Ops run beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from workers.attempt import Attempt

# Each holds a copy of what it saves until it is uploaded: an adapter, which is little, or a merged model, which is as
# much as the base. With two, an upload that hangs leaves room for the others.
_MOST = 2


class Saves:
    """Told and asked by the thread that runs the Ops.

    One whose model was thrown away meanwhile goes on, and counts until it ends: nobody will refer to what it writes.
    """

    def __init__(self) -> None:
        self._futures: dict[str, Future[Attempt]] = {}

    def start(self, model_id: str, write: Callable[[], Attempt]) -> Future[Attempt]:
        future: Future[Attempt] = Future()
        self._futures[model_id] = future

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:
                # For whoever commits it.
                future.set_exception(error)

        self.spawn(model_id, run)
        return future

    def spawn(self, model_id: str, run: Callable[[], None]) -> None:
        """In a thread that ends with the process: one that hangs must not keep it."""
        threading.Thread(target=run, name="save", daemon=True).start()

    def running(self) -> set[str]:
        """Ids of the models."""
        self._futures = {model_id: future for model_id, future in self._futures.items() if not future.done()}
        return set(self._futures)

    def has_room(self, model_id: str) -> bool:
        """For one more, of this model. Two of a model might write the same generation, with different bits."""
        running = self.running()
        return len(running) < _MOST and model_id not in running

    def await_any(self, seconds: float) -> None:
        """Returns when one has ended, or after so long."""
        wait(self._futures.values(), seconds, FIRST_COMPLETED)

    def finish(self, model_id: str, seconds: float | None = None) -> None:
        """Returns when that of the model has ended, or after so long."""
        if model_id in self._futures:
            wait([self._futures[model_id]], seconds)

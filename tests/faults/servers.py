"""A state server that can be killed, and restarted on the data it wrote."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.servers import free_port, start_valkey


class Valkey:
    """A Valkey server whose `url` stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._running = ExitStack()
        self.url = self._running.enter_context(start_valkey(folder, self._port))

    def kill(self) -> None:
        """Sends kill -9; nothing is flushed."""
        self._running.close()

    def start(self) -> None:
        self._running.enter_context(start_valkey(self._folder, self._port))

    def __enter__(self) -> Valkey:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.close()

"""Listening on a pub/sub channel from a thread, over one connection that is made again when it is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

log = logging.getLogger(__name__)
_RECONNECT_S = 0.2


class Channel:
    """Tells `heard` of every message, and `missed` when some may have been lost: at each loss and each new beginning of
    the connection. Both are called from the thread and must not block."""

    def __init__(
        self, client: redis.Redis, name: str, heard: Callable[[str], None], missed: Callable[[], None] = lambda: None
    ) -> None:
        self._redis, self._name, self._heard, self._missed = client, name, heard, missed
        self.listening = threading.Event()
        """Set while messages are heard."""

    def start(self) -> None:
        threading.Thread(target=self._listen, name=f"listening on {self._name}", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                self._listen_once()
            except (redis.RedisError, OSError) as error:
                log.warning("lost the channel %s: %s", self._name, error)
            self.listening.clear()
            self._missed()
            time.sleep(_RECONNECT_S)

    def _listen_once(self) -> None:
        with self._redis.pubsub() as channel:  # type: ignore[no-untyped-call]
            channel.subscribe(self._name)
            for message in channel.listen():
                if message["type"] == "subscribe":
                    self._missed()
                    self.listening.set()
                elif message["type"] == "message":
                    self._heard(message["data"].decode())

"""Tells the sweeper that calls can come in here: only such time counts against a seq that is missing."""

from __future__ import annotations

import contextlib
import threading
import time

import redis

from app.stores.interfaces import OpLog

_BEAT_S = 3.0
_LIFE_S = 10.0


def beat_for_ever(oplog: OpLog) -> None:
    """In a thread, as long as this process lives. It may fail: Redis away, or full, is no time to come in."""

    def loop() -> None:
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                oplog.take_calls(_LIFE_S)
            time.sleep(_BEAT_S)

    threading.Thread(target=loop, name="presence", daemon=True).start()

"""Retries against servers that may be down for a moment, because this process had them killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import redis

T = TypeVar("T")
_AWAY_S = 120.0
_POLL_S = 0.02


def patiently(read: Callable[[], T]) -> T:
    """Retries `read` until Redis answers, and returns its value. Raises its last error after minutes."""
    deadline = time.monotonic() + _AWAY_S
    while True:
        try:
            return read()
        except (redis.ConnectionError, redis.TimeoutError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)

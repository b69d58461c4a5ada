"""Connections to the state server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import redis

# redis-py's own pool raises at its 100th connection; 1,200 threads that wait their turn need far fewer.
_CONNECTIONS = 64
_WAIT_S = 10
_OUTAGES = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.MasterDownError,
)
# Answers redis-py has no class for: a full disk under the append-only file, missing replicas, a slow script.
_PASSING = ("MISCONF ", "NOREPLICAS ", "BUSY ")


def connect(url: str) -> redis.Redis:
    """A thread-safe client. Raises redis.ConnectionError only at use.

    No socket timeout: redis-py 8 defaults to 5 s, which cuts pub/sub and slow saves. Keepalive finds dead peers.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=_WAIT_S,
        socket_timeout=None,
        socket_connect_timeout=2,
        socket_keepalive=True,
        health_check_interval=10,
    )
    return redis.Redis.from_pool(pool)


def is_outage(error: redis.RedisError) -> bool:
    """Whether it passes: the server is away, still loading, full, or may not write just now."""
    return isinstance(error, _OUTAGES) or str(error).startswith(_PASSING)


def read_hash(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    """A hash's fields; the client's types also allow for text answers, which `connect` never asks for."""
    return cast(dict[bytes, bytes], client.hgetall(key))


def text_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}

"""Connections to the state server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import redis


def connect(url: str) -> redis.Redis:
    """A thread-safe client. Raises redis.ConnectionError only at use.

    No socket timeout: redis-py 8 defaults to 5 s, which cuts pub/sub and slow saves. Keepalive finds dead peers.
    """
    return redis.Redis.from_url(
        url, socket_timeout=None, socket_connect_timeout=2, socket_keepalive=True, health_check_interval=10
    )


def read_hash(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    """A hash's fields; the client's types also allow for text answers, which `connect` never asks for."""
    return cast(dict[bytes, bytes], client.hgetall(key))


def text_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}

"""Isolation of one model, request, queue or session within a round of maintenance."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from app.errors import Unavailable
from app.stores.redis.client import is_outage

log = logging.getLogger(__name__)


@contextmanager
def isolated(id_: str) -> Iterator[None]:
    """Logs and swallows an error of the block, which works on `id_` alone, so that the round goes on with the others.
    Raises an outage of the state server."""
    try:
        yield
    except Exception as error:
        if isinstance(error, redis.RedisError) and is_outage(error):
            raise
        trace = not isinstance(error, Unavailable)
        log.warning("%s is left out of this round: %s", id_, error, exc_info=trace, extra={"request_id": id_})

"""The errors that the console explains on a page, as a message and a status."""

from __future__ import annotations

import logging

from redis import RedisError

from app.api.errors import UNEXPECTED
from app.errors import STATE_SERVER_AWAY, OpError, RequestError
from app.stores.redis.client import is_outage
from app.stores.redis.durability import NotDurable

log = logging.getLogger(__name__)
FAILURES = (RequestError, OpError, RedisError)


def explain(error: RequestError | OpError | RedisError) -> tuple[str, int]:
    """The message and the HTTP status of one of FAILURES."""
    if isinstance(error, RequestError):
        return str(error), error.status
    if isinstance(error, OpError):
        return str(error), 400 if error.category == "user" else 500
    if not is_outage(error):
        log.error("unexpected error", exc_info=error)
        return UNEXPECTED, 500
    log.warning("the state server failed: %s", type(error).__name__)
    return str(error) if isinstance(error, NotDurable) else STATE_SERVER_AWAY, 503

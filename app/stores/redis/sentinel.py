"""State servers behind Redis Sentinel: each new connection asks the sentinels for the primary.

After a promotion the connections to the former primary end, and the next ones go to the new primary. That one may lack
the newest writes of the former, so the first connection to it begins a history (`begin_history` in lua/leases.lua)
before anything else is written there.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from app.settings import SENTINEL_SCHEME
from app.stores.redis import scripts
from app.stores.redis.durability import ask, check_connection

log = logging.getLogger(__name__)
# A sentinel answers from memory. One that does not is passed over for the next one.
_ANSWER_S = 2.0
_FORM = f"{SENTINEL_SCHEME}[[user]:password@]host:port,host:port,host:port/service[?db=number]"


def is_sentinel(url: str) -> bool:
    """True for the URL of a service that sentinels watch."""
    return url.startswith(SENTINEL_SCHEME)


def pool(url: str, **options: Any) -> redis.BlockingConnectionPool:
    """A pool of connections to the primary of a service. `options` are those of a BlockingConnectionPool. User,
    password and database in the URL are those of the Redis servers. Raises ValueError for a URL that is not of
    _FORM."""
    sentinels, service, given = _parse(url)
    once = Retry(NoBackoff(), 0)
    asked = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S, "retry": once}
    return _Pool(service, _Sentinels(sentinels, sentinel_kwargs=asked), **{**options, **given})  # type: ignore[no-untyped-call]


def check_primary(connection: Any) -> None:
    """Opens the session of a new connection to a primary, as `check_connection` does, and begins a history if the
    primary is new. Raises NotDurable."""
    facts = check_connection(connection)
    if ask(connection, "EVAL", scripts.alone("begin_history"), "0", facts["master_replid"]):
        log.warning(
            "the state server has a new primary at %s:%s: workers restore their models, and what the former primary "
            "had not sent to it is lost",
            connection.host,
            connection.port,
        )


class _Sentinels(Sentinel):
    """redis-py moves the sentinel that answered to the front of its list. Two threads that did so at once could leave
    another sentinel out of the list for ever."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The address of the primary. Raises MasterNotFoundError, in one line without the options of each client."""
        with self._lock:
            try:
                found: tuple[str, int] = super().discover_master(service_name)  # type: ignore[no-untyped-call]
            except MasterNotFoundError:
                raise MasterNotFoundError(f"no sentinel names a primary of {service_name!r}") from None
        return found


class _Pool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """A SentinelConnectionPool whose callers wait for a free connection."""


def _parse(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """The sentinels, the service and the options of its connections."""
    credentials, at, rest = url.removeprefix(SENTINEL_SCHEME).rpartition("@")
    hosts, _, path = rest.partition("/")
    service, _, query = path.partition("?")
    places = [urlsplit(f"//{host}") for host in hosts.split(",")]
    sentinels = [(place.hostname, place.port) for place in places if place.hostname and place.port]
    if len(sentinels) < len(places) or not service:
        raise ValueError(f"the URL must be of the form {_FORM}")
    options: dict[str, Any] = parse_url(f"redis://{credentials}{at}host?{query}")  # type: ignore[no-untyped-call]
    del options["host"]
    return sentinels, service, options

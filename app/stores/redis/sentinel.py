"""State servers behind Redis Sentinel: each new connection asks the sentinels for the primary.

After a promotion the connections to the former primary end, and the next ones go to the new primary. That one may lack
the newest writes of the former, so the first connection to it begins a history (`begin_history` in lua/leases.lua)
before anything else is written there.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from app.settings import SENTINEL_SCHEMES
from app.stores.redis import scripts
from app.stores.redis.durability import ask, check_connection

log = logging.getLogger(__name__)
# A sentinel answers from memory. One that does not is passed over for the next one.
_ANSWER_S = 2.0
_FORM = (
    f"{SENTINEL_SCHEMES[0]}[[user]:password@]host:port,host:port,host:port/service[?db=number&sentinel_password=text]"
)
_OF_SENTINELS = "sentinel_"


def is_sentinel(url: str) -> bool:
    """True for the URL of a service that sentinels watch."""
    return url.startswith(SENTINEL_SCHEMES)


def pool(url: str, **options: Any) -> redis.BlockingConnectionPool:
    """A pool of connections to the primary of a service. `options` are those of a BlockingConnectionPool. User,
    password and database in the URL are those of the Redis servers; `sentinel_username` and `sentinel_password` are
    those of the sentinels. TLS, and its options in the URL (`ssl_ca_certs` and others of redis-py), hold for both.
    Raises ValueError for a URL that is not of _FORM."""
    sentinels, service, of_servers, of_sentinels = _parse(url)
    once = Retry(NoBackoff(), 0)
    asked = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S, "retry": once, **of_sentinels}
    return _Pool(service, _Sentinels(sentinels, sentinel_kwargs=asked), **{**options, **of_servers})  # type: ignore[no-untyped-call]


def check_primary(connection: Any) -> None:
    """Opens the session of a new connection to a primary, as `check_connection` does, and begins a history if the
    primary is new. Raises NotDurable."""
    facts = check_connection(connection)
    if ask(connection, "EVAL", scripts.alone("begin_history"), "0", facts["master_replid"]):
        log.warning(
            "the state server has a new primary at %s:%s: workers restore their models; writes that the former primary "
            "had not replicated to it are lost",
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
            except MasterNotFoundError as error:
                why = ": they want another sentinel_password" if "AuthenticationError" in str(error) else ""
                raise MasterNotFoundError(f"no sentinel names a primary of {service_name!r}{why}") from None
        return found


class _Pool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """A SentinelConnectionPool whose callers wait for a free connection."""


def _parse(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any], dict[str, Any]]:
    """The sentinels, the service, and the options of connections to its servers and to the sentinels."""
    scheme, _, rest = url.partition("+sentinel://")
    credentials, at, rest = rest.rpartition("@")
    hosts, _, path = rest.partition("/")
    service, _, query = path.partition("?")
    places = [urlsplit(f"//{host}") for host in hosts.split(",")]
    sentinels = [(place.hostname, place.port) for place in places if place.hostname and place.port]
    if len(sentinels) < len(places) or not service:
        raise ValueError(f"the URL must be of the form {_FORM}")
    given = {name: values[0] for name, values in parse_qs(query).items()}
    of_sentinels: dict[str, Any] = {
        name.removeprefix(_OF_SENTINELS): given.pop(name) for name in list(given) if name.startswith(_OF_SENTINELS)
    }
    of_servers: dict[str, Any] = parse_url(f"redis://{credentials}{at}host?{urlencode(given)}")  # type: ignore[no-untyped-call]
    del of_servers["host"]
    if scheme == "rediss":
        tls = {"ssl": True, **{name: value for name, value in of_servers.items() if name.startswith("ssl_")}}
        of_servers, of_sentinels = {**of_servers, **tls}, {**of_sentinels, **tls}
    return sentinels, service, of_servers, of_sentinels

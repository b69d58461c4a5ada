"""kombu's Redis transport. It keeps no list of unacknowledged messages at the broker, and never waits for broadcasts.

**Unacknowledged messages.** kombu writes each message that a worker reserves to the broker, and removes it when it is
acknowledged: two of six round trips of an Op, for messages that the redispatch task dispatches again anyway.

**Broadcasts.** kombu reads this connection, which carries the commands of Flower and `celery inspect`, when data or its
end has arrived. With a retry, redis-py would answer its end with a new connection and wait there for a message, for
ever: the worker would get no more tasks (redis-py 8.1, `PubSub.parse_response`). Without one, kombu sees the error and
connects again.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from kombu.transport import TRANSPORT_ALIASES, redis, virtual
from kombu.utils.url import as_url
from redis import ConnectionPool, Redis, RedisError
from redis.client import PubSub
from redis.connection import parse_url

from app.errors import SetupError

_SCHEMES = ("redis", "rediss")
_CHECKS = ("required", "optional", "none")


class _Unacknowledged(virtual.QoS):  # type: ignore[misc]
    """The messages that this worker has reserved and not acknowledged. Only the worker knows them."""

    def restore_unacked(self) -> list[Any]:
        """Sends them back, up to the first one that the broker does not take. kombu would wait for a silent broker once
        for each message, and write those that are left to a file."""
        self._flush()
        with suppress(RedisError, OSError):
            for message in self._delivered.values():
                self.channel._restore(message)
        self._delivered.clear()
        return []


class _Channel(redis.Channel):  # type: ignore[misc]
    ack_emulation = False

    _publisher: Redis | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.QoS = _Unacknowledged

    def _create_client(self, asynchronous: bool = False) -> Redis:
        """Keeps the client of the pool: kombu makes one for each message, in 0.1 to 0.2 ms."""
        if asynchronous:
            made: Redis = super()._create_client(asynchronous=True)
            return made
        if self._publisher is None or self._publisher.connection_pool is not self.pool:
            self._publisher = super()._create_client()
        return self._publisher

    @cached_property
    def subclient(self) -> PubSub:
        """The client that subscribes to broadcasts, without the retry of the others."""
        params = {**self._connparams(asynchronous=True), "retry_on_timeout": False}
        subscriber: PubSub = self.Client(connection_pool=ConnectionPool(**params)).pubsub()
        return subscriber


class Transport(redis.Transport):  # type: ignore[misc]
    Channel = _Channel


def register() -> None:
    """Makes redis:// and rediss:// brokers use this transport, in the whole process."""
    TRANSPORT_ALIASES.update(dict.fromkeys(_SCHEMES, f"{__name__}:{Transport.__name__}"))


def kombu_url(url: str) -> str:
    """The broker's URL without the options that redis-py takes behind it: kombu raises TypeError for most of them.

    Those that name the server stay, in the places where kombu looks for them.
    """
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        return url
    found = _read(url)
    place = (found.get(part) for part in ("host", "port", "username", "password"))
    return str(as_url(scheme, *place, path=str(found.get("db", 0))))


def tls(url: str) -> dict[str, Any] | bool:
    """The TLS options of a rediss:// broker, for Celery and Flower; False for a broker without TLS.

    They are those of redis-py. The server's certificate is checked unless the URL says otherwise: kombu would not check
    it. Raises SetupError when redis-py does not know what the URL says.
    """
    if urlsplit(url).scheme != "rediss":
        return False
    asked = {name: value for name, value in _read(url).items() if name.startswith("ssl_")}
    options = {"ssl_cert_reqs": "required", **asked}
    if (found := options["ssl_cert_reqs"]) not in _CHECKS:
        raise SetupError(f"the broker's URL has ssl_cert_reqs={found}; write required, optional or none")
    return options


def _read(url: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise SetupError(f"the broker's URL: {error}") from None
    return found

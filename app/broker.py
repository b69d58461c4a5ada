"""kombu's Redis transport, whose event loop never waits for a message on the connection of broadcasts.

kombu reads this connection, which carries the commands of Flower and `celery inspect`, when data or its end has
arrived. With a retry, redis-py would answer its end with a new connection and wait there for a message, for ever: the
worker would get no more tasks (redis-py 8.1, `PubSub.parse_response`). Without one, kombu sees the error and connects
again.
"""

from __future__ import annotations

from functools import cached_property

from kombu.transport import TRANSPORT_ALIASES, redis
from redis import ConnectionPool
from redis.client import PubSub


class _Channel(redis.Channel):  # type: ignore[misc]
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
    TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), f"{__name__}:{Transport.__name__}"))

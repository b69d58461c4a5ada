"""Connections to the state server, calls of its scripts, and the pub/sub channel that wakes long polls.

Each process has one pub/sub connection, and each waiting long poll has one callback. One connection per long poll would
cost 1,000 sockets at 1,000 polls; this design costs one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import redis

from app import ids
from app.errors import Unavailable
from app.settings import EngineSettings
from app.sockets import ANSWER_S, KEEPALIVE
from app.stores.redis import keys, scripts, sentinel
from app.stores.redis.durability import CONFIRMED, NotDurable, check_connection, confirmed

log = logging.getLogger(__name__)
T = TypeVar("T")
# redis-py's own pool raises at its 100th connection; 1,200 threads that wait for a free one need far fewer.
_CONNECTIONS = 64
_WAIT_S = 10
_OUTAGES = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.MasterDownError,
    NotDurable,
)
# Replies that redis-py has no class for: a full disk under the append-only file, missing replicas, a slow script.
_PASSING = ("MISCONF ", "NOREPLICAS ", "BUSY ")
_FULL = "FULL "
# Prefixes of an index that are read in one round trip.
_PREFIXES = 20

_RECONNECT_S = 0.2
# A channel on which nothing was heard for this long asks the server.
_ASK_S = 2.0


def connect(url: str) -> redis.Redis:
    """A thread-safe client. Raises redis.ConnectionError only when it is used, and ValueError for a text that is no
    URL of Redis or of its sentinels.

    Calls raise redis.TimeoutError when the server does not answer within ANSWER_S.
    """
    return _client(url)


def connect_state(url: str) -> redis.Redis:
    """A client of the state server, like that of `connect`. Each of its connections raises NotDurable while the server
    may lose what it acknowledges."""
    check = sentinel.check_primary if sentinel.is_sentinel(url) else check_connection
    return _client(url, redis_connect_func=check)


def _client(url: str, **options: Any) -> redis.Redis:
    create = sentinel.pool if sentinel.is_sentinel(url) else redis.BlockingConnectionPool.from_url
    pool = create(
        url,
        max_connections=_CONNECTIONS,
        timeout=_WAIT_S,
        socket_timeout=ANSWER_S,
        socket_connect_timeout=2,
        socket_keepalive=True,
        socket_keepalive_options=KEEPALIVE,
        health_check_interval=10,
        **options,
    )
    return redis.Redis.from_pool(pool)


def is_outage(error: redis.RedisError) -> bool:
    """Returns True for a temporary error: the server is away, still loads, is full, cannot write at the moment, or came
    back with settings that may lose calls."""
    return isinstance(error, _OUTAGES) or str(error).startswith(_PASSING)


def read_hash(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    """The fields of a hash. The cast is needed since the client's types allow text replies; `connect` never asks for
    these."""
    return cast(dict[bytes, bytes], client.hgetall(key))


def text_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def found_fields(names: Iterable[str], values: Any) -> dict[str, str]:
    """The fields with these names that a hash has, by a reply to HMGET."""
    return {name: text.decode() for name, text in zip(names, values, strict=True) if text is not None}


def texts(found: Any) -> list[str]:
    """The texts in a reply. It is Any, since the client's types allow replies that `connect` never asks for."""
    return [text.decode() for text in found]


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in slices of `size`: the server answers other clients between two round trips."""
    return (items[start : start + size] for start in range(0, len(items), size))


def flat(fields: Mapping[str, str] | Mapping[str, int]) -> list[str | int]:
    """Names and values in turn, as scripts take them."""
    return [part for pair in fields.items() for part in pair]


class Scripts:
    """Calls a script by name: `scripts("admit", ...)`. All input goes through ARGV; the script builds keys from ids.

    A script that drains work has `flags=allow-oom`, and also runs above maxmemory. A script that admits work calls
    `no_room` first. Its refusal is raised here as Unavailable. A script of `CONFIRMED` may raise NotReplicated.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._scripts = {name: client.register_script(text) for name, text in scripts.packaged(settings).items()}
        self._redis, self.replicas = client, settings.replicas

    def __call__(self, name: str, *argv: bytes | str | float) -> Any:
        try:
            if self.replicas and name in CONFIRMED:
                return self._confirmed(name, argv)
            return self._scripts[name](args=argv)
        except redis.ResponseError as error:
            if str(error).startswith(_FULL):
                raise Unavailable(f"{str(error).removeprefix(_FULL)}; try again soon") from None
            raise

    def each(self, name: str, calls: Sequence[Sequence[bytes | str | float]]) -> list[Any]:
        """The replies of a script that only reads, once for each list of arguments, all in one round trip."""
        with self._redis.pipeline(transaction=False) as pipe:
            for argv in calls:
                pipe.evalsha(self._scripts[name].sha, 0, *argv)
            try:
                return pipe.execute()
            except redis.exceptions.NoScriptError:
                return [self(name, *argv) for argv in calls]

    def by_prefix(self, name: str, prefixes: Sequence[str], most: int, more: Sequence[str]) -> Iterator[list[Any]]:
        """For each prefix the rows of a script that reads a slice of an index, those of all slices below the prefix.

        The script's ARGV are the slice's first and last id as of ZRANGEBYLEX, the most ids to read, and `more`. It
        returns the last id of a full slice or '', and then its rows. A round trip is for several prefixes and reads
        `most` ids of them all: the server answers other clients in between.
        """
        for some in slices(prefixes, _PREFIXES):
            firsts: dict[int, bytes | str] = {i: f"[{prefix}" for i, prefix in enumerate(some)}
            found: list[list[Any]] = [[] for _ in some]
            while firsts:
                share = most // len(firsts)
                calls = [(first, b"(" + some[i].encode() + b"\xff", share, *more) for i, first in firsts.items()]
                replies = dict(zip(firsts, self.each(name, calls), strict=True))
                for i, (_, *rows) in replies.items():
                    found[i] += rows
                firsts = {i: b"(" + last for i, (last, *_) in replies.items() if last}
            yield from found

    def confirmed(self, *command: str) -> Any:
        """The reply to a command that reads, once replicas have what it shows. Raises NotReplicated."""
        if not self.replicas:
            return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        return confirmed(self._redis, self.replicas, *command)

    def _confirmed(self, name: str, argv: Sequence[bytes | str | float]) -> Any:
        script = self._scripts[name]
        try:
            return confirmed(self._redis, self.replicas, "EVALSHA", script.sha, 0, *argv)
        except redis.exceptions.NoScriptError:
            return confirmed(self._redis, self.replicas, "EVAL", script.script, 0, *argv)


class Channel:
    """A thread that listens to one pub/sub channel and reconnects by itself.

    A connection on which the server does not answer for ANSWER_S counts as lost. The thread calls `heard` with every
    message. It calls `missed` when messages may have been lost: each time the connection is lost, and each time it is
    made again. Neither callback may block the thread.
    """

    def __init__(
        self, client: redis.Redis, name: str, heard: Callable[[str], None], missed: Callable[[], None] = lambda: None
    ) -> None:
        self._redis, self._name, self._heard, self._missed = client, name, heard, missed
        self.listening = threading.Event()
        """Set while the channel receives messages."""
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._listen, name=f"listening on {self._name}", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, at the latest after a second."""
        self._closed.set()

    def _listen(self) -> None:
        warned = False
        while not self._closed.is_set():
            try:
                self._listen_once()
            except (redis.RedisError, OSError) as error:
                # One line for each outage, not one for each try.
                if self.listening.is_set() or not warned:
                    log.warning("lost the pub/sub connection of channel %s, connecting again: %s", self._name, error)
                warned = True
            self.listening.clear()
            self._missed()
            self._closed.wait(_RECONNECT_S)

    def _listen_once(self) -> None:
        with self._redis.pubsub() as channel:  # type: ignore[no-untyped-call]
            channel.subscribe(self._name)
            heard_at = time.monotonic()
            while not self._closed.is_set():
                message = channel.get_message(timeout=1.0)
                if message is None:
                    _ask(channel, time.monotonic() - heard_at)
                    continue
                heard_at = time.monotonic()
                if message["type"] == "subscribe":
                    self._missed()
                    self.listening.set()
                elif message["type"] == "message":
                    self._heard(message["data"].decode())


def _ask(channel: redis.client.PubSub, silent_s: float) -> None:
    """Asks the server for a sign of life. Raises TimeoutError when the last question stays without an answer."""
    if silent_s > ANSWER_S:
        raise redis.TimeoutError(f"no answer for {silent_s:.0f} s")
    if silent_s > _ASK_S:
        channel.ping()


class Waiter:
    """Waits until a request id, or any request of a poll target (app/ids.py), becomes terminal.

    Publications may be lost during a reconnect; all waiters are woken then.

    The broker, if given, publishes that a request's token stream has more entries. A reader that misses this message
    reads the entries somewhat later.
    """

    def __init__(self, client: redis.Redis, broker: redis.Redis | None = None) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[str, set[Callable[[], None]]] = defaultdict(set)
        self._done = Channel(client, keys.DONE_CHANNEL, self._wake, self._wake_all)
        self._done.start()
        if broker is not None:
            Channel(broker, keys.DONE_CHANNEL, self._wake).start()

    def wait(self, id_: str, timeout_s: float, check: Callable[[], bool]) -> None:
        """Returns once `id_` is published, after `timeout_s` seconds, or at once if `check()` returns True.

        `check` runs after the waiter is registered, so a result that arrives in between is not missed.
        """
        event = threading.Event()
        with self.watch(id_, event.set):
            self._done.listening.wait(min(timeout_s, 5))
            if not check():
                event.wait(timeout_s)

    @contextlib.contextmanager
    def watch(self, id_: str, wake: Callable[[], None]) -> Iterator[None]:
        """Calls `wake`, which must not block, each time that `id_` is published during the block or may have been
        missed."""
        with self._lock:
            self._callbacks[id_].add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks[id_].discard(wake)
                if not self._callbacks[id_]:
                    del self._callbacks[id_]

    def _wake(self, request_id: str) -> None:
        with self._lock:
            for id_ in (request_id, ids.target_of(request_id)):
                for wake in self._callbacks.get(id_, ()):
                    wake()

    def _wake_all(self) -> None:
        with self._lock:
            for callbacks in self._callbacks.values():
                for wake in callbacks:
                    wake()

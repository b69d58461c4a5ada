"""Checks that a state server keeps every call that it acknowledges.

A server with other settings (no append-only file, eviction) takes a call, answers, and may lose it. So each new
connection asks the server for its settings first: also a server that comes back with other settings is noticed. The two
questions take a millisecond.

A disk is one copy. With `engine.replicas`, `confirmed` waits for copies on replicas. Redis replicates in the order of
its writes, so a replica that has a call also has all that was written before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import redis
from redis.utils import str_if_bytes

from app.errors import NotReplicated, SetupError
from app.stores.redis import scripts

log = logging.getLogger(__name__)
# The scripts declare flags, which is new in Redis 7. Valkey reports the version of Redis that it is compatible with.
_LEAST_VERSION = 7
# A replica that syncs its disk for each write was seen to take 1.2 s on a busy machine.
_WAIT_MS = 2000

CONFIRMED = frozenset(
    {
        # A client gets an answer that says that these happened.
        *("admit", "admit_sample", "cancel_sample", "create_model", "end_model", "end_sampler", "finish", "join"),
        *("end_samplers", "move_session", "note", "open_session", "put_loss", "put_new", "put_newer"),
        *("put_reserved", "refuse", "reserve", "update", "update_same"),
        # Objects are deleted next, or written for good.
        *("close_pages", "delete", "delete_older", "delete_same"),
        *("end_unused_samplers", "forget", "give_up_adapters", "set_snapshot", "spill_garbage"),
    }
)
"""The scripts that the world outside relies on. A commit is not among them: a poll confirms its result."""


class NotDurable(redis.RedisError):
    """The state server may lose what it acknowledges. The text names each setting to change."""


def check_connection(connection: Any) -> Mapping[str, str]:
    """Opens the session of a new connection (redis-py's `redis_connect_func`), and returns the server's INFO. Raises
    NotDurable."""
    connection.on_connect()
    facts = _info(ask(connection, "INFO"))
    if faults := list(_faults(facts, _appendfsync(connection))):
        raise NotDurable(f"the state server may lose calls that it acknowledged: {'; '.join(faults)}")
    return facts


def check_at_start(client: redis.Redis) -> None:
    """Raises SetupError when the server of a client that checks its connections is not durable. A server that does not
    answer is no error, because it is checked when it comes back."""
    try:
        client.ping()
    except NotDurable as error:
        raise SetupError(str(error)) from None
    except (redis.RedisError, OSError) as error:
        log.warning("the state server could not be checked yet: %s", error)


def confirmed(client: redis.Redis, replicas: int, *command: Any) -> Any:
    """The reply to a command, once `replicas` replicas have all that the server had written when it replied. Raises
    NotReplicated with the reply; the command has been run then.

    WAIT waits for what its own connection wrote, and a repeated call writes nothing: a mark is written in front of it.
    All three share a connection, since another one may lead to another primary.
    """
    with client.pipeline(transaction=False) as pipe:
        for each in (command, ("EVAL", scripts.alone("mark"), 0), ("WAIT", replicas, _WAIT_MS)):
            pipe.execute_command(*each)  # type: ignore[no-untyped-call]
        reply, mark, reached = pipe.execute(raise_on_error=False)
    if isinstance(reply, redis.RedisError):
        raise reply
    if not isinstance(mark, int) or not isinstance(reached, int) or reached < replicas:
        error = NotReplicated(f"fewer than {replicas} replicas of the state server have this call; try again soon")
        error.reply = reply
        raise error
    return reply


def ask(connection: Any, *command: str) -> Any:
    """The reply to a command on a connection that is being opened."""
    connection.send_command(*command, check_health=False)
    return connection.read_response()


def _info(text: str | bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in str_if_bytes(text).splitlines())
    return {name: value for name, colon, value in lines if colon}


def _appendfsync(connection: Any) -> str | None:
    """The value of appendfsync, which INFO does not have. None where the server, as some managed ones, does not allow
    CONFIG."""
    try:
        found = ask(connection, "CONFIG", "GET", "appendfsync")
    except redis.ResponseError as error:
        if not isinstance(error, redis.exceptions.NoPermissionError) and "unknown" not in str(error):
            raise
        _warn_once("the state server does not allow CONFIG GET: make sure that its appendfsync is always")
        return None
    values = list(found.values()) if isinstance(found, Mapping) else found[1::2]
    return str_if_bytes(values[0]) if values else None


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _faults(facts: Mapping[str, str], appendfsync: str | None) -> Iterator[str]:
    version, role = facts.get("redis_version", "unknown"), facts.get("role", "server")
    mode = facts.get("server_mode") or facts.get("redis_mode", "unknown")  # Valkey, Redis
    policy = facts.get("maxmemory_policy", "unknown")
    if mode != "standalone" or role != "master":
        yield f"it is a {mode} {role}; name a standalone primary"
        return
    if not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < _LEAST_VERSION:
        yield f"its version is {version}; use Redis 7 or later, or Valkey"
    if facts.get("aof_enabled") != "1":
        yield "it keeps no append-only file; set appendonly yes"
    if appendfsync not in (None, "always"):
        yield f"appendfsync is {appendfsync}; set appendfsync always"
    if policy != "noeviction":
        yield f"maxmemory-policy is {policy}; set maxmemory-policy noeviction"
    if facts.get("maxmemory", "0") == "0":
        yield "maxmemory is 0, so it takes calls until the machine has no memory; set maxmemory"

"""State servers with replicas and sentinels, all of them real processes."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import redis

from tests.servers import free_port, start_valkey, valkey_binary

SERVICE = "tinsmith"
# A primary waits 5 s for further replicas before it sends its data to the first one.
AT_ONCE = ["--repl-diskless-sync-delay", "0"]
_REPLICAS, _SENTINELS, _QUORUM = 2, 3, 2
_WITHIN_S = 120


class SentinelSet:
    """A primary, two replicas and three sentinels. `url` names the primary by the sentinels."""

    def __init__(self, folder: Path) -> None:
        self._ports = [free_port() for _ in range(1 + _REPLICAS)]
        with ExitStack() as running:
            self._primary = running.enter_context(ExitStack())
            self._primary.enter_context(start_valkey(folder / "primary", self._ports[0], options=AT_ONCE))
            for port in self._ports[1:]:
                running.enter_context(start_replica(folder / f"replica-{port}", [self._ports[0], port]))
            sentinels = [
                running.enter_context(start_sentinel(folder / str(i), self._ports[0], _QUORUM))
                for i in range(_SENTINELS)
            ]
            places = [f"127.0.0.1:{port}" for port in sentinels]
            self.url = f"redis+sentinel://{','.join(places)}/{SERVICE}"
            self._await_agreement(places)
            self._running = running.pop_all()

    def cut_off_replicas(self) -> None:
        """Gives the replicas all that the primary has now, and nothing of what comes later. A replica that has been cut
        off for less than 20 s is still promoted."""
        with ExitStack() as clients:
            primary, *replicas = (clients.enter_context(_client(port)) for port in self._ports)
            primary.set("mark", "")
            assert primary.wait(_REPLICAS, _WITHIN_S * 1000) == _REPLICAS
            for replica in replicas:
                replica.config_set("masteruser", "nobody", "masterauth", "wrong")
            primary.execute_command("CLIENT KILL TYPE replica")
            _await(lambda: primary.info("replication")["connected_slaves"] == 0, "the replicas are cut off")

    def kill_primary(self) -> None:
        """Sends kill -9 to the first primary, which does not come back."""
        self._primary.close()

    def _await_agreement(self, places: list[str]) -> None:
        """Returns when each sentinel knows the replicas and the other sentinels."""
        for place in places:
            with redis.Redis.from_url(f"redis://{place}") as sentinel:
                _await(partial(_is_complete, sentinel), f"the sentinel {place} knows all servers")
                # A sentinel that got no CPU for 2 s does nothing for 30 s, as its clock may have jumped.
                sentinel.execute_command("SENTINEL DEBUG", "tilt-trigger", _WITHIN_S * 1000)

    def __enter__(self) -> SentinelSet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.close()


@contextmanager
def start_sentinel(folder: Path, primary: int, quorum: int, *options: str) -> Iterator[int]:
    """Starts a sentinel of the server on the port `primary`, and yields its own port. `options` are further lines of
    its settings. A primary that is silent for less than 2 s may only be slow."""
    folder.mkdir(parents=True)
    port, config = free_port(), folder / "sentinel.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary} {quorum}",
        f"sentinel down-after-milliseconds {SERVICE} 2000",
        f"sentinel failover-timeout {SERVICE} 10000",
        *options,
    ]
    config.write_text("".join(f"{line}\n" for line in lines))
    process = subprocess.Popen([valkey_binary(), config, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        _await(partial(_listens, port), "the sentinel listens")
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def start_replica(folder: Path, ports: Sequence[int]) -> Iterator[str]:
    """Starts a replica, on the second port, of the server on the first one. Yields its URL once it has all data."""
    with start_valkey(folder, ports[1], options=["--replicaof", "127.0.0.1", str(ports[0])]) as url:
        with redis.Redis.from_url(url) as replica:
            _await(lambda: replica.info("replication")["master_link_status"] == "up", "the replica has all data")
        yield url


def _client(port: int) -> redis.Redis:
    return redis.Redis(port=port)


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _is_complete(sentinel: redis.Redis) -> bool:
    try:
        state = sentinel.sentinel_masters().get(SERVICE, {})
    except redis.ConnectionError:
        return False
    return state.get("num-slaves") == _REPLICAS and state.get("num-other-sentinels") == _SENTINELS - 1


def _await(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not what():
        assert time.monotonic() < deadline, f"in vain for {_WITHIN_S} s: {why}"
        time.sleep(0.05)

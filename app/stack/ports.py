"""Ports of the stack's servers and of the workers' Prometheus metrics. They stay the same when a worker or the stack is
started again."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from app.errors import SetupError
from app.settings import METRICS_PORT_VARIABLE, ApiSettings, netloc
from app.stack.child import Command
from app.stack.data_folder import write_private

_LOOPBACK = "127.0.0.1"
ANY_PORT = "0"
"""The value of METRICS_PORT_VARIABLE for a worker that takes any free port, because it runs on another machine."""


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which clients, such as the SDK, reach this machine's servers without the proxy of `environ`:
    a proxy would look for them on its own machine."""
    named = environ.get("no_proxy") or environ.get("NO_PROXY")
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, (named, _LOOPBACK, "localhost"))))


def free_port(
    host: str, port: int, host_option: str = "--host (api.host)", port_option: str = "--port (api.port)"
) -> int:
    """Returns `port` itself, or any free port for 0. Raises SetupError when the server cannot listen on it, with the
    option to change."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        remedy = f"choose another port with {port_option}; 0 takes any free port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"choose an address of this machine with {host_option}"
        elif error.errno == errno.EADDRINUSE:
            remedy = f"stop the process that uses it, or {remedy}"
        raise SetupError(f"cannot listen on {netloc(host, port)}: {error.strerror or error}; {remedy}") from None


def kept_port(last: int, taken: Collection[int]) -> int:
    """Returns a free loopback port that is not `taken`: `last` where possible (0: there is none), so that clients find
    a server again."""
    with suppress(SetupError):
        if last and last not in taken:
            return free_port(_LOOPBACK, last)
    while (found := free_port(_LOOPBACK, 0)) in taken:
        pass
    return found


def listen_port(api: ApiSettings) -> int:
    """The port that the API will listen on. Raises SetupError as `free_port` does."""
    return free_port(api.host, api.port)


def with_metrics_ports(commands: Iterable[Command], file: Path, taken: Collection[int]) -> list[Command]:
    """Returns the commands, with a port for each worker that has none: its last one in `file` where that is free, and
    not `taken`. The ports are written to the file."""
    found = list(commands)
    last = json.loads(file.read_text()) if file.exists() else {}
    used = {*taken, *(int(port) for command in found if (port := command.environ.get(METRICS_PORT_VARIABLE)))}
    done = [_with_port(command, last, used) if _lacks_port(command) else command for command in found]
    write_private(file, json.dumps({**last, **_chosen(done)}))
    return done


def metrics_urls(commands: Iterable[Command]) -> dict[str, str]:
    """The URL of each worker's metrics on this machine, by the worker's name."""
    return {name: f"http://{_LOOPBACK}:{port}/metrics" for name, port in _chosen(commands).items()}


def _lacks_port(command: Command) -> bool:
    return command.serves_base_model and METRICS_PORT_VARIABLE not in command.environ


def _with_port(command: Command, last: dict[str, int], used: set[int]) -> Command:
    port = kept_port(last.get(command.name, 0), used)
    used.add(port)
    return replace(command, environ={**command.environ, METRICS_PORT_VARIABLE: str(port)})


def _chosen(commands: Iterable[Command]) -> dict[str, int]:
    ports = {command.name: command.environ.get(METRICS_PORT_VARIABLE, ANY_PORT) for command in commands}
    return {name: int(port) for name, port in ports.items() if port != ANY_PORT}

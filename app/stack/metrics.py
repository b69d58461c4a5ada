"""Ports of the workers' Prometheus metrics. They stay the same when a worker or the whole stack is started again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from app.settings import METRICS_PORT_VARIABLE
from app.stack import checks
from app.stack.child import Command
from app.stack.data_folder import write_private

_HOST = "127.0.0.1"
ANY_PORT = "0"
"""The value of the variable for a worker that takes any free port, because it runs on another machine."""


def with_ports(commands: Iterable[Command], file: Path, taken: Collection[int]) -> list[Command]:
    """Returns the commands, with a port for each worker that has none: its last one in `file` where that is free, and
    not `taken`. The ports are written to the file."""
    found = list(commands)
    last = json.loads(file.read_text()) if file.exists() else {}
    used = {*taken, *(int(port) for command in found if (port := command.environ.get(METRICS_PORT_VARIABLE)))}
    done = [_with_port(command, last, used) if _lacks_port(command) else command for command in found]
    write_private(file, json.dumps({**last, **_chosen(done)}))
    return done


def urls(commands: Iterable[Command]) -> dict[str, str]:
    """The URL of each worker's metrics on this machine, by the worker's name."""
    return {name: f"http://{_HOST}:{port}/metrics" for name, port in _chosen(commands).items()}


def _lacks_port(command: Command) -> bool:
    return command.serves_base_model and METRICS_PORT_VARIABLE not in command.environ


def _with_port(command: Command, last: dict[str, int], used: set[int]) -> Command:
    port = checks.kept_port(last.get(command.name, 0), used)
    used.add(port)
    return replace(command, environ={**command.environ, METRICS_PORT_VARIABLE: str(port)})


def _chosen(commands: Iterable[Command]) -> dict[str, int]:
    ports = {command.name: command.environ.get(METRICS_PORT_VARIABLE, ANY_PORT) for command in commands}
    return {name: int(port) for name, port in ports.items() if port != ANY_PORT}

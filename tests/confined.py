"""Confines a process as if on another machine: it reaches one server only, and cannot read one folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_SERVER, _HIDDEN = "TESTS_ONLY_SERVER", "TESTS_HIDDEN_FOLDER"
_LOOKS = ("open", "os.listdir", "os.scandir")


def surroundings(url: str, home: Path, hidden: Path | None = None) -> Mapping[str, str]:
    """Environment of a process that calls `confine`: the server is also its Hub, and its caches are empty."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TINKER_"))}
    return {
        **inherited,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "TINKER_TELEMETRY": "0",
        _SERVER: url,
        _HIDDEN: str(hidden or ""),
    }


def confine() -> None:
    """Makes every connection elsewhere an error from now on. (The SDK's own transport is not seen here.)"""
    server, hidden = urlsplit(os.environ[_SERVER]), os.environ[_HIDDEN]

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            outside = arguments[1][:2] != (server.hostname, server.port)
        elif event == "socket.getaddrinfo":
            outside = arguments[0] not in (None, server.hostname)
        else:
            outside = bool(hidden) and event in _LOOKS and str(arguments[0]).startswith(hidden)
        if outside:
            raise PermissionError(f"{event}: {arguments}")

    sys.addaudithook(refuse)

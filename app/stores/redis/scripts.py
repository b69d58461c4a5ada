"""Loads lua/*.lua. A script's text is its name's only definition; Redis caches it by hash."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import redis


class Scripts:
    """Calls a script by name: `scripts("admit", ...)`. All input goes through ARGV; keys are built from ids inside."""

    def __init__(self, client: redis.Redis) -> None:
        folder = files(__package__) / "lua"
        self._scripts = {
            item.name.removesuffix(".lua"): client.register_script(item.read_text())
            for item in folder.iterdir()
            if item.name.endswith(".lua")
        }

    def __call__(self, name: str, *argv: bytes | str | float) -> Any:
        return self._scripts[name](args=argv)

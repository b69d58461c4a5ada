"""Loads lua/*.lua. A script's text is its name's only definition; Redis caches it by hash."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import redis


class Scripts:
    """Calls a script by name: `scripts("admit", ...)`. All input goes through ARGV; keys are built from ids inside."""

    def __init__(self, client: redis.Redis) -> None:
        texts = {item.name.removesuffix(".lua"): item.read_text() for item in (files(__package__) / "lua").iterdir()}
        prelude = texts.pop("prelude")
        self._scripts = {name: client.register_script(prelude + text) for name, text in texts.items()}

    def __call__(self, name: str, *argv: bytes | str | float) -> Any:
        return self._scripts[name](args=argv)

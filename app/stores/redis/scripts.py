"""Loads lua/*.lua. The file lua/<name>.lua is the only definition of a script; Redis caches its text by hash."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import redis

from app.errors import Unavailable
from app.settings import EngineSettings

_FULL = "FULL "
# A smaller payload is not worth a separate object.
_SPILL_LEAST = 4096
_BEFORE_ALL = ("prelude", "limits", "placing")


class Scripts:
    """Calls a script by name: `scripts("admit", ...)`. All input goes through ARGV; the script builds keys from ids.

    A script that drains work starts with the line `#!lua flags=allow-oom`, and also runs above maxmemory. A script
    that admits work calls `no_room` first. Its refusal is raised here as Unavailable.
    """

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        texts = {item.name.removesuffix(".lua"): item.read_text() for item in (files(__package__) / "lua").iterdir()}
        prelude = _limits(settings) + "".join(texts.pop(name) for name in _BEFORE_ALL)
        self._scripts = {name: client.register_script(_join(prelude, text)) for name, text in texts.items()}

    def __call__(self, name: str, *argv: bytes | str | float) -> Any:
        try:
            return self._scripts[name](args=argv)
        except redis.ResponseError as error:
            if str(error).startswith(_FULL):
                raise Unavailable(f"{str(error).removeprefix(_FULL)}; try again soon") from None
            raise


def _limits(settings: EngineSettings) -> str:
    limits = {
        "payload_budget": settings.payload_budget_bytes,
        "memory_share": settings.memory_share,
        "spill_at_once": settings.spill_bytes,
        "spill_least": _SPILL_LEAST,
    }
    return f"local LIMITS = {{{', '.join(f'{name} = {value}' for name, value in limits.items())}}}\n"


def _join(prelude: str, text: str) -> str:
    """Puts the prelude before a script's text; a shebang stays the first line."""
    if not text.startswith("#!"):
        return prelude + text
    shebang, rest = text.split("\n", 1)
    return f"{shebang}\n{prelude}{rest}"

"""What came, or was changed on purpose, since ecb7b39: nothing else may differ from it.

To add to a contract: list the new name here, with today's value where there was another. Stored forms (codec, names,
scripts) may only gain values of new kinds; what is there is read by other versions.
"""

from __future__ import annotations

from typing import Any

_DEVICES = {"default": [], "items": {"minimum": 0, "type": "integer"}, "type": "array"}

CHANGED: dict[str, dict[str, Any]] = {
    # A negative index was let in, and failed when the worker started.
    "settings": {
        f"base_models.{section}.devices": _DEVICES for section in ("trainer", "full", "sampler", "full_sampler")
    },
}
ADDED: dict[str, set[str]] = {
    "command line": {"tinsmith --version"},
}

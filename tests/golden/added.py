"""Additions and deliberate changes since ecb7b39. Nothing else may differ from that commit.

To add to a contract, list the new name here, with today's value if there was another. Stored forms (codec, names,
scripts) may only gain values of new kinds, because other versions read the existing ones.
"""

from __future__ import annotations

from typing import Any

_DEVICES = {"default": [], "items": {"minimum": 0, "type": "integer"}, "type": "array"}

CHANGED: dict[str, dict[str, Any]] = {
    # A negative index was accepted, and failed when the worker started.
    "settings": {
        f"base_models.{section}.devices": _DEVICES for section in ("trainer", "full", "sampler", "full_sampler")
    },
}
ADDED: dict[str, set[str]] = {
    "command line": {"tinsmith --version"},
    # Keys that start so. Processes of ecb7b39 neither read nor write them, which `RedisRecords._listed` expects.
    "keys left behind": {"tinsmith:checkpoints_of:"},
}

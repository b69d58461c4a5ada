"""GPUs of the workers that one section of the settings starts: `devices`, divided among `count` copies."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field, NonNegativeInt

from app.errors import SetupError

Gpus = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
"""GPUs of one worker by nvidia-smi's numbers."""
Devices = tuple[NonNegativeInt, ...] | tuple[Gpus, ...]
"""One list, which the copies divide among them, or a list for each copy."""


def shown(devices: Devices) -> str:
    """The value as in the config file."""
    return json.dumps(devices)


def gpus_of_copies(name: str, devices: Devices, count: int) -> tuple[tuple[int, ...], ...]:
    """Returns the GPUs of each of `count` copies, without any where none are named.

    One list is divided in its order into equal parts, as vLLM's data parallel does. Raises SetupError, with the
    section's `name`, when it has no equal parts or there are more or fewer lists than copies.
    """
    if not count:
        return ()
    lists = tuple(part for part in devices if isinstance(part, tuple))
    flat = tuple(part for part in devices if isinstance(part, int))
    if lists:
        if len(lists) != count:
            raise SetupError(
                f"{name}.devices is {shown(devices)}, but {name}.count is {count}; give it a list of GPUs for each copy"
            )
        return lists
    each, rest = divmod(len(flat), count)
    if rest:
        raise SetupError(
            f"{name}.devices is {shown(devices)}, which {name}.count = {count} copies cannot divide equally; name as "
            f"many GPUs for each, or a list for each copy, such as {json.dumps([flat] * count)} to share them"
        )
    return tuple(flat[each * copy : each * (copy + 1)] for copy in range(count))

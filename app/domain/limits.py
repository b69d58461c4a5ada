"""What one project, or one API key, may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import ClassVar, Self

Changes = Mapping[str, float | None]
"""Of some limits, by name: what holds instead; None lifts one."""
COUNTS = ("live_models", "storage_bytes", "concurrent_samples")
"""Those that are whole numbers."""
_MAY_BE_0 = ("live_models", "storage_bytes")
_WEIGHTS = (0.001, 1000.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit. Raises ValueError for one that nothing could meet.

    requests_per_s      calls that make work or change something, on average
    tokens_per_s        tokens of batches, prompts and drawn sequences, on average
    live_models         runs that have not ended, of sessions that have not
    storage_bytes       of all checkpoints with a path together
    concurrent_samples  sequences being sampled, or waiting for it
    weight              of a project's share, where several want the same workers, from 0.001 to 1,000; a key's is not
                        looked at
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # it is a section of the settings too
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    live_models: int | None = None
    storage_bytes: int | None = None
    concurrent_samples: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if value is None and name != "weight":
                continue
            if value is None or not 0 <= value < inf or (value == 0 and name not in _MAY_BE_0):
                raise ValueError(f"{name} is {value}: give a number {'from' if name in _MAY_BE_0 else 'above'} 0")
        least, most = _WEIGHTS
        if not least <= self.weight <= most:
            raise ValueError(f"weight is {self.weight}: give a number from {least} to {most:.0f}")

    def changed(self, changes: Changes) -> Self:
        """With some of them replaced. Raises ValueError."""
        return replace(self, **changes)  # type: ignore[arg-type]  # each was checked when it was made


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Limits))

PROJECT, KEY = "project", "key"


@dataclass(frozen=True, slots=True)
class Payer:
    """Whom a call counts for. `kind` is PROJECT or KEY; what they are called here, a project and a key never share."""

    kind: str
    id: str
    limits: Limits

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.id}"


@dataclass(frozen=True, slots=True)
class Charge:
    """What one call takes of each payer: itself, `tokens`, and room for so many live models more.

    With `stores` it makes a checkpoint, of `stored` bytes where that is known before. `samples` is how many sequences
    it draws.
    """

    payers: tuple[Payer, ...] = ()
    tokens: int = 0
    samples: int = 0
    models: int = 0
    stores: bool = False
    stored: int = 0


FREE = Charge()


@dataclass(frozen=True, slots=True)
class Used:
    """What a payer has of what Limits limits, by the same names; the rates are averages over the last seconds, and None
    where they are not limited."""

    live_models: int
    storage_bytes: int
    concurrent_samples: int
    requests_per_s: float | None
    tokens_per_s: float | None

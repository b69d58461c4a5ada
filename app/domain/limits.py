"""The limits of one project or one API key, a project's budget, and how long it keeps checkpoints and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, ClassVar, Self

Changes = Mapping[str, float | None]
"""New values of some limits, by name; None removes a limit."""
SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 365 * 24 * 3600
RETENTION = ("checkpoint_ttl_s", "keep_checkpoints")
COUNTS = ("live_models", "live_sessions", "storage_bytes", "concurrent_samples", *RETENTION, "capture_days")
"""The limits that are whole numbers."""
UNCHARGED = ("weight", *RETENTION, "capture_days")
"""The limits that refuse no call."""
OF_PROJECTS = (*UNCHARGED, "monthly_budget")
"""The limits that a key cannot have."""
_MAY_BE_0 = ("live_models", "live_sessions", "storage_bytes", "monthly_budget")
_RANGES = {
    "checkpoint_ttl_s": (SHORTEST_TTL_S, LONGEST_TTL_S),
    "keep_checkpoints": (1, 1000),  # each deletion checks all newer checkpoints of the run again, in one script
    "capture_days": (1, 3650),
    "weight": (0.001, 1000),
}
"""The limits with a least and a greatest value of their own."""


def _described(default: Any, description: str) -> Any:
    """A field of the settings, in which pydantic reads the description."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a project or key. None means no limit. Raises ValueError for a limit that no call could meet."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # this class is also a section of the settings
    requests_per_s: float | None = _described(None, "calls that create work or change something, on average")
    tokens_per_s: float | None = _described(None, "tokens of batches, prompts and sampled sequences, on average")
    live_models: int | None = _described(None, "runs that have not ended, in sessions that have not ended")
    live_sessions: int | None = _described(None, "sessions that have not ended")
    storage_bytes: int | None = _described(
        None, "total size of checkpoints, of kept adapters of saves without a path, of unfinished uploads and of routes"
    )
    concurrent_samples: int | None = _described(None, "sequences that wait or are being sampled")
    weight: float = _described(
        1.0,
        "weight of a project when several projects want the same workers, from 0.001 to 1,000; a key has none",
    )
    checkpoint_ttl_s: int | None = _described(
        None,
        "seconds that a project keeps a checkpoint whose save or copy gave no TTL, from 3,600 (an hour) to 315,360,000 "
        "(ten years); a key has none",
    )
    keep_checkpoints: int | None = _described(
        None,
        "how many checkpoints of each kind a run of the project keeps, from 1 to 1,000, the newest ones. Published "
        "ones, and those whose owner set a TTL, stay and do not count; a key has none",
    )
    monthly_budget: float | None = _described(
        None,
        "US dollars that a project may spend in a calendar month (UTC), by [prices]; above it, training and sampling "
        "get 403. A key has none",
    )
    capture_days: int | None = _described(
        None,
        "days for which the answers of the project's chats and completions are kept as datums, encrypted, from 1 to "
        "3,650; no answer is kept without it or without capture_secret; a key has none",
    )

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if value is None and name != "weight":
                continue
            if value is None or not 0 <= value < inf or (value == 0 and name not in _MAY_BE_0):
                raise ValueError(f"{name} is {value}: give a number {'from' if name in _MAY_BE_0 else 'above'} 0")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} is {value}: give a number from {least} to {most}")

    def changed(self, changes: Changes) -> Self:
        """Returns a copy with some limits replaced. Raises ValueError."""
        return replace(self, **changes)  # type: ignore[arg-type]  # each value was checked when it was made


NAMES: tuple[str, ...] = tuple(each.name for each in fields(Limits))

PROJECT, KEY = "project", "key"


@dataclass(frozen=True, slots=True)
class Payer:
    """The project or key that a call counts for. `kind` is PROJECT or KEY. A project and a key never have the same
    `name`."""

    kind: str
    id: str
    limits: Limits

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.id}"


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of one call to each payer: the call itself, `tokens`, and the live models and sessions it
    adds.

    With `stores` the call makes a checkpoint, of `stored` bytes where the size is known before. `samples` is the number
    of sequences it samples. With `spends` its project must have spent less than its budget. `spent` is the amount so
    far.
    """

    payers: tuple[Payer, ...] = ()
    tokens: int = 0
    samples: int = 0
    models: int = 0
    stores: bool = False
    stored: int = 0
    sessions: int = 0
    spends: bool = False
    spent: float = 0.0


FREE = Charge()


@dataclass(frozen=True, slots=True)
class Used:
    """The current use of a payer, under the names of Limits. The rates are averages over the last seconds, and None
    where they are not limited."""

    live_models: int
    live_sessions: int
    storage_bytes: int
    concurrent_samples: int
    requests_per_s: float | None
    tokens_per_s: float | None

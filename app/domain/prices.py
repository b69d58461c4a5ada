"""The prices of usage, and the cost of an amount."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any, ClassVar, Self

from app.domain.results import CACHED, DEVICE, HOUR_S, PREFILLED, SAMPLED, STORED, TRAINED

MONTH_H = 720
"""Hours of a month of storage, as the SDK counts them."""
GB = 10**9
_MILLION = 10**6


def _described(description: str) -> Any:
    """A field of the settings without a value, in which pydantic reads the description."""
    return field(default=None, metadata={"description": description})


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars. None means no price. Raises ValueError for a negative or infinite price, or NaN."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # this class is also a section of the settings
    training: float | None = _described("US dollars for a million tokens of forward and forward_backward")
    prefill: float | None = _described("US dollars for a million prompt tokens that the engine computed")
    cached_prefill: float | None = _described("US dollars for a million prompt tokens from the engine's cache")
    sampling: float | None = _described("US dollars for a million sampled tokens")
    device_hour: float | None = _described("US dollars for an hour of a GPU, or of a rank or sampler on a CPU")
    gb_month: float | None = _described("US dollars for 720 hours of a gigabyte (10^9 bytes) of checkpoints")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value < inf:
                raise ValueError(f"{name} is {value}: give a number from 0")

    def over(self, other: Self) -> Self:
        """These prices, with those of `other` where there are none."""
        return replace(other, **{name: value for name, value in asdict(self).items() if value is not None})

    def rate(self, kind: str) -> float | None:
        """The price of one unit of the kind's amounts. Saves have none."""
        per_unit = {
            TRAINED: (self.training, _MILLION),
            PREFILLED: (self.prefill, _MILLION),
            CACHED: (self.cached_prefill, _MILLION),
            SAMPLED: (self.sampling, _MILLION),
            DEVICE: (self.device_hour, 1000 * HOUR_S),
            STORED: (self.gb_month, GB * MONTH_H * HOUR_S),
        }
        price, units = per_unit.get(kind, (None, 1))
        return None if price is None else price / units

    def cost(self, kind: str, amount: float) -> float | None:
        """The cost of an amount; None without a price."""
        rate = self.rate(kind)
        return None if rate is None else rate * amount


PricesOf = Callable[[str], Prices]
"""The prices of a base model, by its name."""


def total(costs: list[float | None]) -> float | None:
    """The sum of the known costs; None if none is known."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None

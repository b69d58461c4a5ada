"""The cost of a project's usage in this month, which its budget limits."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.prices import PricesOf, total
from app.stores.redis.pages import RedisPages


@dataclass(frozen=True, slots=True)
class Spending:
    """Amounts of the state server at the prices of the settings."""

    pages: RedisPages
    prices_of: PricesOf

    def this_month(self, project: str) -> float | None:
        """The cost of the project's usage in this calendar month (UTC) so far, in US dollars; None while nothing that
        it used has a price."""
        used = self.pages.this_month(project)
        return total([self.prices_of(base).cost(kind, amount) for (kind, base), amount in used.items()])

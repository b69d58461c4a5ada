"""The cost of a project's usage in this month, which its budget limits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from app.domain.prices import PricesOf, total
from app.domain.results import HOUR_S
from app.services.tenants.usage import totals
from app.stores.redis.pages import Ledgers, RedisPages


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


def refill(ledgers: Ledgers, today: date) -> int:
    """Refills the usage of today's month from its hourly pages, after the state server lost it. Returns the number of
    projects that had lost some. Usage that is there already stays, so a repeat changes nothing. Raises Unavailable."""
    hours, refilled = hours_of(today.replace(day=1)), 0
    for project in ledgers.files.projects("usage"):
        stored, amounts = ledgers.files.find("usage", project, hours), Counter[tuple[str, str]]()
        for fields in stored.values():
            for kind, _, base_model, amount in totals(fields):
                amounts[kind, base_model] += amount
        refilled += ledgers.pages.refill_month(project, hours, (page.hour for page in stored), amounts)
    return refilled


def hours_of(first: date) -> range:
    """The hours since 1970 of the month that begins on `first`."""
    after = (first + timedelta(days=31)).replace(day=1)
    begin, end = (int(datetime(day.year, day.month, 1, tzinfo=UTC).timestamp()) // HOUR_S for day in (first, after))
    return range(begin, end)

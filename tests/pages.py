"""Usage and audit pages at a state server: tests read them and let time pass."""

from __future__ import annotations

import time
from collections import Counter

import redis

from app.domain.results import HOUR_S
from app.settings import EngineSettings
from app.stores.pages import LedgerPage
from app.stores.redis import keys
from app.stores.redis.pages import RedisPages

# No test takes that long between two reads of the hour, even on a machine that stands still for a while.
_SAFE_S = 60.0


def in_mid_hour() -> None:
    """Returns when the hour does not end soon, so that all writes of a test go to one page."""
    left = HOUR_S - time.time() % HOUR_S
    if left < _SAFE_S:
        time.sleep(left + 0.1)


def listed(client: redis.Redis) -> list[LedgerPage]:
    return [LedgerPage.parse(name.decode()) for name in client.zrange(keys.PAGES, 0, -1)]


def used(client: redis.Redis, project: str = "me") -> dict[str, int]:
    """Amounts by "<kind> <session> <base model>", over all hours, without the time of devices."""
    return {name: amount for name, amount in _all(client, project).items() if not name.startswith(("run ", "device "))}


def used_by_runs(client: redis.Redis, project: str = "me") -> dict[str, int]:
    """Amounts by "<kind> <run> <base model>", over all hours."""
    return {name[4:]: amount for name, amount in _all(client, project).items() if name.startswith("run ")}


def device_ms(client: redis.Redis, project: str = "me") -> int:
    """The time of devices, over all hours."""
    return sum(amount for name, amount in _all(client, project).items() if name.startswith("device "))


def _all(client: redis.Redis, project: str) -> dict[str, int]:
    pages, total = RedisPages(client, EngineSettings()), Counter[str]()
    for page in listed(client):
        if (page.ledger, page.project) == ("usage", project):
            fields = pages.fields(page)
            total.update({name: int(amount) for name, amount in fields.items() if not name.startswith("session ")})
    return dict(total)


def age(client: redis.Redis, hours: int = 1) -> list[LedgerPage]:
    """Moves all existing pages so many hours back, as if that time had passed."""
    for page in listed(client):
        older = LedgerPage(page.ledger, page.project, page.hour - hours)
        client.rename(keys.page(page), keys.page(older))
        client.zrem(keys.PAGES, str(page))
        client.zadd(keys.PAGES, {str(older): older.hour})
    return listed(client)

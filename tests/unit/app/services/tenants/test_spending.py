"""A month's usage that the state server lost comes back from the hourly pages, each of them once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
import redis

from app.domain.results import HOUR_S
from app.services.tenants import spending
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.pages import LedgerPage, PageFiles, StorageUse
from app.stores.redis import keys
from app.stores.redis.pages import Ledgers, RedisPages
from app.stores.redis.records import RedisRecords
from tests.pages import in_mid_hour


@dataclass
class Books:
    """A ledger in this month. `past` are two other hours of the month than the present one."""

    ledgers: Ledgers
    now: float
    past: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.month = spending.hours_of(self.today.replace(day=1))
        self.past = [hour for hour in self.month if hour != self.hour][:2]

    @property
    def hour(self) -> int:
        return int(self.now // HOUR_S)

    @property
    def today(self) -> date:
        return datetime.fromtimestamp(self.now, UTC).date()

    def store(self, hour: int, project: str = "me", **amounts: str) -> None:
        """Stores a page with amounts of the session "s" and of its run "r"."""
        fields = {f"{kind} s base": amount for kind, amount in amounts.items()}
        of_run = {f"run {kind} r base": amount for kind, amount in amounts.items()}
        self.ledgers.files.add(LedgerPage("usage", project, hour), {**fields, **of_run, "session s": '{"user": ""}'})

    def measure(self, hour: int, byte_seconds: int) -> None:
        """Counts storage at the state server."""
        self.now += 1
        use = [StorageUse("me", "base", hour, byte_seconds)]
        assert self.ledgers.pages.measure(self.ledgers.pages.measured(), self.now, use)

    def refill(self) -> int:
        return spending.refill(self.ledgers, self.today)

    def used(self, project: str = "me") -> dict[str, float]:
        return {
            kind: amount for (kind, base), amount in self.ledgers.pages.this_month(project).items() if base == "base"
        }


@pytest.fixture
def books(client: redis.Redis, tmp_path: Path) -> Books:
    in_mid_hour()
    files = PageFiles(FolderStore(tmp_path, "", ""))
    return Books(Ledgers(RedisPages(client, EngineSettings()), files), RedisRecords(client).now())


def test_a_lost_month_is_the_sum_of_its_pages_of_each_project_and_a_repeat_changes_nothing(books: Books):
    books.store(books.past[0], training="30", sampling_sample="4")
    books.store(books.past[1], training="7")
    books.store(books.past[1], "you", training="1")
    for hour in (books.month.start - 1, books.month.stop):
        books.store(hour, training="1000")  # of other months
    books.measure(books.hour, 5)  # since the loss
    assert books.refill() == 2
    expected = {"training": 37.0, "sampling_sample": 4.0, "storage": 5.0}
    assert (books.used(), books.used("you")) == (expected, {"training": 1.0})
    assert books.refill() == 0
    assert books.used() == expected
    books.measure(books.hour, 2)
    assert books.used() == expected | {"storage": 7.0}


def test_a_page_that_is_in_both_stores_counts_once(books: Books):
    books.store(books.past[0], storage="9")
    books.measure(books.past[0], 5)
    books.measure(books.hour, 1)
    assert books.refill() == 1
    assert books.used() == {"storage": 10.0}


def test_usage_that_is_still_there_is_never_lowered(client: redis.Redis, books: Books):
    books.measure(books.hour, 100)
    client.delete(keys.page(LedgerPage("usage", "me", books.hour)))
    books.store(books.past[0], storage="9")
    assert books.refill() == 0
    assert books.used() == {"storage": 100.0}


def test_a_refilled_month_is_kept_as_long_as_any(client: redis.Redis, books: Books):
    books.store(books.past[0], training="30")
    books.refill()
    assert [client.ttl(key) > 31 * 24 * HOUR_S for key in client.keys("tinsmith:month:*")] == [True]

"""Usage is counted once, in the script that ends the call. The page of a past hour is closed permanently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import redis

from app.domain.limits import PROJECT, Charge, Limits, Payer
from app.domain.records import Model, Session
from app.domain.results import Result
from app.errors import Fenced, Unavailable
from app.settings import EngineSettings
from app.stores.pages import LedgerPage, StorageUse
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords, dump
from tests.pages import age, in_mid_hour, listed, used, used_by_runs
from tests.servers import MAX_MEMORY
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, own
from tests.unit.app.stores.redis.test_samples import QUEUE, SAMPLER, samples
from tests.unit.app.stores.redis.test_samples import admit as admit_sample

__all__ = ["samples"]
FAILED = Result(b"{}", failed=True)
TOKENS = {"training": 30}
DRAWN = {"sampling_prefill": 5, "sampling_sample": 7}
OF_THE_SAMPLE = {"sampling_prefill session base": 5, "sampling_sample session base": 7}


@pytest.fixture
def pages(client: redis.Redis) -> RedisPages:
    in_mid_hour()
    return RedisPages(client, EngineSettings())


def test_a_commit_counts_what_it_used_and_no_second_one_does(oplog, client):
    for seq in range(2):
        admit(oplog, seq)
    lease = own(oplog)
    oplog.commit(lease, 0, OK, usage=TOKENS)
    oplog.commit(lease, 1, OK, usage={"training": 12, "checkpoint": 1})
    for seq in (0, 1):
        with pytest.raises(Fenced):
            oplog.commit(lease, seq, OK, usage=TOKENS)
    assert used(client) == {"training session base": 42, "checkpoint session base": 1}
    assert used_by_runs(client) == {f"training {MODEL} base": 42, f"checkpoint {MODEL} base": 1}


def test_an_owner_that_was_replaced_counts_nothing(oplog, client):
    admit(oplog, 0)
    old = own(oplog)
    oplog.release(MODEL, old.worker)
    own(oplog, "b/1")
    with pytest.raises(Fenced):
        oplog.commit(old, 0, OK, usage=TOKENS)
    assert listed(client) == []


def test_what_failed_counts_nothing(oplog, samples, client):
    admit(oplog, 0)
    oplog.commit(own(oplog), 0, FAILED, usage=TOKENS)
    samples.finish_sample(admit_sample(samples, 0), FAILED, DRAWN)
    assert listed(client) == []


def test_a_sample_counts_once_and_not_when_it_was_cancelled_before(samples, client):
    done, cancelled = admit_sample(samples, 0), admit_sample(samples, 1)
    samples.cancel_sample(cancelled)
    for request in (done, done, cancelled):
        samples.finish_sample(request, OK, DRAWN)
    assert used(client) == OF_THE_SAMPLE


def test_usage_is_of_the_project_that_has_the_run_when_it_is_committed(oplog, client):
    RedisRecords(client).put_new(Session.namespace, "session", dump(Session("me", 0.0)))
    for seq in range(2):
        admit(oplog, seq)
    lease = own(oplog)
    oplog.commit(lease, 0, OK, usage=TOKENS)
    RedisLifecycle(client, EngineSettings()).move("session", "other")
    oplog.commit(lease, 1, OK, usage={"training": 1})
    assert (used(client), used(client, "other")) == ({"training session base": 30}, {"training session base": 1})


def test_a_page_says_who_opened_a_session_and_what_he_calls_it(oplog, pages, client):
    opened = Session("me", 0.0, user="jo", user_metadata={"team": "a"})
    RedisRecords(client).put_new(Session.namespace, "session", dump(opened))
    admit(oplog, 0)
    oplog.commit(own(oplog), 0, OK, usage=TOKENS)
    [page] = listed(client)
    assert json.loads(pages.fields(page)["session session"]) == {"user": "jo", "user_metadata": {"team": "a"}}


def test_every_hour_and_model_has_amounts_of_its_own(oplog, pages, client):
    other = MODEL.replace("session", "session2")
    oplog.create_model(other, dump(Model("me", "session2", "a base/with a name", 0.0)))
    oplog.admit(other, 0, "forward_backward", b"", "d")
    admit(oplog, 0)
    oplog.commit(own(oplog), 0, OK, usage=TOKENS)
    [page] = age(client)
    lease = oplog.acquire(other, "a/1")
    oplog.commit(lease, 0, OK, usage={"training": 1})
    found = pages.find("usage", ["me"], range(page.hour, page.hour + 2))
    assert [each.hour for each in found] == [page.hour, page.hour + 1]
    assert pages.find("usage", ["me"], range(page.hour, page.hour + 1)).keys() == {page}
    assert pages.find("audit", ["me"], range(page.hour + 2)) == pages.find("usage", ["you"], range(page.hour + 2)) == {}
    assert used(client) == {"training session base": 30, "training session2 a base/with a name": 1}


def test_only_pages_of_past_hours_are_closed(pages, client):
    RedisRecords(client).note("audit", "me", "one", "x")
    assert pages.close(9) == []
    past = age(client)
    RedisRecords(client).note("audit", "me", "two", "x")
    assert pages.close(9) == past
    pages.drop(past[0])
    assert (pages.close(9), pages.fields(past[0])) == ([], {})
    assert len(listed(client)) == 1


def test_nothing_is_written_on_a_closed_page_even_if_the_clock_is_set_back(pages, client):
    records = RedisRecords(client)
    records.note("audit", "me", "one", "x")
    [now] = listed(client)
    # State after the clock was two hours ahead.
    client.set(keys.PREFIX + "pages_closed", now.hour + 1)
    records.note("audit", "me", "two", "x")
    assert pages.close(9) == [now]
    assert listed(client) == [now, LedgerPage("audit", "me", now.hour + 2)]


def test_an_entry_is_written_once_with_its_time(pages, client):
    records = RedisRecords(client)
    records.note("audit", "me", "one", "first")
    records.note("audit", "me", "one", "second")
    [page] = listed(client)
    [(key, text)] = pages.fields(page).items()
    ms, _, said = text.partition(" ")
    assert (key, said) == ("one", "first")
    assert abs(int(ms) / 1000 - records.now()) < 60


@pytest.fixture
def full(client: redis.Redis) -> Iterator[redis.Redis]:
    client.config_set("maxmemory", 1)
    yield client
    client.config_set("maxmemory", MAX_MEMORY)


def test_a_full_server_takes_no_entry_but_an_urgent_one_and_counts_what_ends(oplog, client, request):
    admit(oplog, 0)
    request.getfixturevalue("full")
    records = RedisRecords(client)
    with pytest.raises(Unavailable):
        records.note("audit", "me", "one", "x")
    records.note("audit", "me", "two", "x", urgent=True)
    oplog.commit(own(oplog), 0, OK, usage=TOKENS)
    assert used(client) == {"training session base": 30}
    assert [page.ledger for page in listed(client)] == ["audit", "usage"]


def test_a_measurement_counts_once_and_exactly(pages, client):
    hour = int(RedisRecords(client).now() // 3600)
    held = [StorageUse("me", "base", hour, 3 * 10**17 + 1)]
    assert pages.measured() is None
    assert pages.measure(None, 100.25, held)
    assert not pages.measure(None, 101.0, held)
    assert not pages.measure(100.0, 101.0, held)
    assert pages.measured() == 100.25
    assert pages.measure(100.25, 101.0, held)
    assert used(client) == {"storage  base": 6 * 10**17 + 2}


def test_a_month_has_all_usage_of_its_project_once(oplog, client, pages):
    now = RedisRecords(client).now()
    assert pages.measure(None, now, [])
    for _ in range(2):
        pages.measure(now, now + 1, [StorageUse("me", "base", int(now // 3600), 10**18)])
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, OK, usage=TOKENS)
    with pytest.raises(Fenced):
        oplog.commit(lease, 0, OK, usage=TOKENS)
    assert pages.this_month("me") == {("training", "base"): 30, ("storage", "base"): 10**18}
    assert pages.this_month("you") == {}
    assert all(client.ttl(key) > 31 * 24 * 3600 for key in client.keys("tinsmith:month:*"))


def test_months_are_those_of_the_calendar(client, pages):
    """Storage is measured for any hour, so it shows the month of each."""
    days = [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day) for day in range(0, 60_000, 29)]
    edges = [datetime(year, month, 1, tzinfo=UTC) for year in (1972, 2000, 2026, 2100) for month in (1, 3, 12)]
    moments = [*days, *(edge - timedelta(hours=ago) for edge in edges for ago in (0, 1))]
    hours = [int(moment.timestamp() // 3600) for moment in moments]
    assert pages.measure(None, 1.0, [StorageUse("me", "base", hour, 1) for hour in hours])
    expected = Counter((moment.year - 1970) * 12 + moment.month - 1 for moment in moments)
    found = {int(key.decode().rpartition("/")[2]): client.hgetall(key) for key in client.keys("tinsmith:month:me/*")}
    assert found == {month: {b"storage base": str(count).encode()} for month, count in expected.items()}


def test_the_time_of_devices_takes_no_tokens_from_a_refund(client, samples):
    """Only tokens count against tokens_per_s."""
    payer, request = Payer(PROJECT, "me", Limits(tokens_per_s=0.001)), f"{SAMPLER}:0"
    samples.admit_sample(request, SAMPLER, "me", QUEUE, b"ask", "d", 100, None, 1, Charge((payer,), 100, 1))
    samples.finish_sample(request, OK, {"sampling_sample": 40, "device": 10**6})
    assert RedisQuotas(client, EngineSettings()).used(payer).tokens_per_s == pytest.approx(4, rel=1e-2)

"""`tinsmith up` tells of each run when it starts, when it has gone on, and why it has ended; a line has 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
import redis

from app import ids
from app.domain.records import Model, Session
from app.settings import EngineSettings
from app.stack import run_news
from app.stack.run_news import RunNews
from app.stack.signals import StopFlag
from app.stores.redis import keys
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SESSION = "8e7b807b-6464-4143-b786-c55fc61da05a"
STARTS = f"run 8e7b807b:0 starts: LoRA 32 of {BASE}, project p"


@pytest.fixture
def records(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client)


@pytest.fixture
def news(client: redis.Redis, records: RedisRecords, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Looks once, at a time when each run that has gone on is due."""
    monkeypatch.setattr(run_news, "_PAUSE_S", 0)
    said: list[str] = []
    looked = RunNews(records, client, said.append)

    def look() -> list[str]:
        said.clear()
        looked.look()
        return list(said)

    return look


def run(records: RedisRecords, client: redis.Redis, number: int = 0) -> str:
    model_id = ids.model_id(SESSION, number)
    records.put(Session.namespace, SESSION, dump(Session("p", records.now())))
    client.zadd(keys.SESSIONS_HEARD, {SESSION: 1})
    record = Model("p", SESSION, BASE, records.now(), "ready", {"rank": 32})
    records.put(Model.namespace, model_id, {**dump(record), "applied": "0"})
    return model_id


def step(records: RedisRecords, client: redis.Redis, model_id: str, number: int) -> None:
    """Commits a batch of 1,000 tokens and its step, two seconds after the last ones."""
    start = int(1000 * records.now()) - 100_000 + 2000 * number
    for at, kind in enumerate(("forward_backward", "optim_step")):
        point = {"metrics": {"loss:sum": 1234.5678}, "tokens": 1000, "weight": 1000.0, "seconds": 1.0}
        point = point if at == 0 else {"metrics": {"grad_norm": 1.0}}
        fields = {"seq": "1", "kind": kind, "point": json.dumps(point)}
        client.xadd(keys.progress(model_id), cast(Any, fields), id=f"{start + at}-0")
    records.update(Model.namespace, model_id, {"steps": str(number), "trained_tokens": str(1000 * number)})


def test_a_run_is_told_of_when_it_starts_goes_on_and_ends(records, client, news):
    assert news() == []
    model_id = run(records, client)
    assert news() == [STARTS] and len(STARTS) <= 80
    assert news() == [], "nothing has happened"
    step(records, client, model_id, 1)
    assert news() == ["run 8e7b807b:0: step 1, loss 1.235, 999 tokens/s"]
    step(records, client, model_id, 2)
    [line] = news()
    assert line.startswith("run 8e7b807b:0: step 2, loss 1.235, ") and line.endswith(" tokens/s")
    RedisLifecycle(client, EngineSettings()).unload(model_id)
    assert news() == ["run 8e7b807b:0 has ended after 2 steps: it was unloaded"]
    assert news() == []


def test_a_run_that_trains_on_after_a_restart_starts_at_its_step(records, client, news):
    step(records, client, run(records, client), 7)
    assert news() == [f"run 8e7b807b:0 starts at step 7: LoRA 32 of {BASE}, project p"]


def ended(lifecycle: RedisLifecycle, client: redis.Redis, records: RedisRecords, model_id: str, how: str) -> None:
    if how == "deleted":
        lifecycle.end_model(model_id)
    elif how == "finished":
        lifecycle.finish(SESSION, "success")
    elif how == "failed":
        records.update(Model.namespace, model_id, {"state": '"failed"'})
    else:
        lifecycle.expire()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("deleted", "it was deleted"),
        ("finished", "its session was finished (success)"),
        ("failed", "it could not be made"),
        ("expired", "its session expired"),
    ],
)
def test_the_end_of_a_run_has_its_cause(how, cause, records, client, news):
    model_id = run(records, client)
    news()
    ended(RedisLifecycle(client, EngineSettings()), client, records, model_id, how)
    assert news() == [f"run 8e7b807b:0 has ended after 0 steps: {cause}"]


def test_a_run_without_a_record_was_deleted(records, client, news):
    model_id = run(records, client)
    news()
    records.delete(Model.namespace, model_id)
    assert news() == ["run 8e7b807b:0 has ended: it was deleted"]


def test_a_run_that_goes_on_is_told_of_every_ten_seconds(records, client, news, monkeypatch):
    monkeypatch.setattr(run_news, "_PAUSE_S", 3600)
    model_id = run(records, client)
    news()
    step(records, client, model_id, 1)
    assert news() == []


def test_a_line_is_due_ten_seconds_after_the_one_before():
    said, further = run_news._Said(1, 100, at=1000.0), run_news._Run(2, 200)
    assert [said.is_due(further, now) for now in (1009.9, 1010.0)] == [False, True]


def test_of_hundreds_of_runs_a_few_lines_are_printed(records, client, news):
    for number in range(300):
        run(records, client, number)
    assert len(news()) == 11
    for number in range(300):
        step(records, client, ids.model_id(SESSION, number), 1)
    assert news()[-1] == "and 290 other runs with news: see `tinsmith status`"


def test_what_did_not_fit_comes_with_the_next_look(records, client, news):
    for number in range(12):
        run(records, client, number)
    first, second = news(), news()
    told = {line.split()[1] for line in [*first[:10], *second]}
    assert told == {f"8e7b807b:{number}" for number in range(12)} and len(second) == 2


def test_a_look_reads_no_run_whole_that_has_no_news(records, client, news):
    for number in range(3):
        run(records, client, number)
    news()
    client.config_resetstat()
    assert news() == []
    assert "cmdstat_hgetall" not in client.info("commandstats")


def test_an_outage_is_no_end_of_the_news(records, client, monkeypatch):
    monkeypatch.setattr(run_news, "_EVERY_S", 0.0)
    stopping, looks = StopFlag(), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            stopping.set()
        raise redis.ConnectionError("away")

    looked = RunNews(records, client, print)
    monkeypatch.setattr(looked, "look", look)
    looked.follow(stopping)
    assert len(looks) == 3

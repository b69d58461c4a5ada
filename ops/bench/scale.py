"""Costs at scale: polls held by one API process, time in scripts, lists beside other projects, and large calls.

The figures of held polls are those of the API alone; no worker runs.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from app import ids
from app.domain.records import Model, Session
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from app.suspension import SUSPENDED_A_THREAD
from ops.bench import api_body, held_polls, large_calls, lua_time, servers, timing
from ops.bench.client import Client
from ops.bench.report import Goal, Outcome
from ops.bench.timing import summary

_POLLS, _WARM_S, _SECONDS = 5000, 60.0, 60.0
_MODELS = (100, 1000, 10_000)
_JOURNAL = 100_000
_FOREIGN, _OWN = 10_000, 10
_LARGE = 60 * 2**20
_ROUNDS = 20
_BEAT_GOAL_MS, _WAKE_GOAL_MS, _LUA_GOAL_MS, _LIST_GOAL_MS = 10.0, 250.0, 20.0, 20.0
_PING_GOAL_MS = 25.0


def run(
    folder: Path,
    polls: int = _POLLS,
    warm_s: float = _WARM_S,
    seconds: float = _SECONDS,
    models: Sequence[int] = _MODELS,
    journal: int = _JOURNAL,
    foreign: int = _FOREIGN,
    large: int = _LARGE,
) -> Outcome:
    found: dict[str, Any] = {}
    places = held_polls.clients_for(polls) // SUSPENDED_A_THREAD
    with servers.prepared_api(_made(folder / "polls"), api_body.INFO, places) as api, servers.running_api(api):
        found["held_polls"] = held_polls.measure(api, polls, warm_s, seconds)
    with servers.prepared_api(_made(folder / "lists"), api_body.INFO) as api, servers.running_api(api):
        found["lists_ms"] = _lists(api, foreign)
    with servers.prepared_api(_made(folder / "lua"), api_body.INFO) as api:
        found["lua"], *others = lua_time.measure(api.settings.redis.url, models, journal)
        found |= zip(("lua_deletion", "lua_large_session", "lua_many_sessions"), others, strict=True)
    with servers.prepared_api(_made(folder / "large"), api_body.INFO) as api:
        found["longest_ping_ms"] = large_calls.measure(api.settings.redis.url, large)
    found |= {"calls_a_model": lua_time.CALLS_A_MODEL, "deleted_calls": journal, "foreign_sessions": foreign}
    found |= {"runs_of_the_large_session": models[-1], "large_call_bytes": large}
    return Outcome(found, tuple(_goals(found)))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _lists(api: servers.Api, foreign: int) -> dict[str, dict[str, float]]:
    """The times of lists of a project with few sessions, beside so many sessions and runs of another."""
    with connect(api.settings.redis.url) as client:
        records, oplog = RedisRecords(client), RedisOpLog(client, api.settings.engine)
        client.config_set("appendfsync", "no")
        for number in range(foreign + _OWN):
            owner, session = "foreign" if number < foreign else held_polls.PROJECT, ids.new_session_id()
            records.put_new(Session.namespace, session, dump(Session(owner, time.time())))
            fields = dump(Model(owner, session, api_body.INFO.name, time.time()))
            oplog.create_model(ids.model_id(session, 0), fields)
        client.config_set("appendfsync", "always")
    with closing(Client(api.url)) as caller:
        sides: Mapping[str, Callable[[], float]] = {
            "sessions": lambda: timing.timed_ms(lambda: _get(api, "sessions")),
            "sessions/search": lambda: timing.timed_ms(lambda: caller.call("sessions/search", {})),
            "training_runs": lambda: timing.timed_ms(lambda: _get(api, "training_runs")),
        }
        timing.alternate(1, sides)
        return {name: summary(found) for name, found in timing.alternate(_ROUNDS, sides).items()}


def _get(api: servers.Api, path: str) -> bytes:
    asked = urllib.request.Request(f"{api.url}/api/v1/{path}", headers={"X-API-Key": servers.API_KEY})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def _goals(found: Mapping[str, Any]) -> Sequence[Goal]:
    polls, largest = found["held_polls"], list(found["lua"].values())[-1]
    others = (found["lua_deletion"], found["lua_large_session"], found["lua_many_sessions"])
    slowest = max(times["most_ms"] for part in (largest, *others) for times in part.values())
    longest = max(ms for step, ms in found["longest_ping_ms"].items() if step != "nothing")
    lists = max(times["p50"] for times in found["lists_ms"].values())
    return (
        Goal("polls held", polls["held"], "at_least", polls["polls"], ""),
        Goal("heartbeat beside them: p50", polls["heartbeat_ms"]["p50"], "at_most", _BEAT_GOAL_MS, "ms"),
        Goal("result to answer: p99", polls["wake_ms"]["p99"], "at_most", _WAKE_GOAL_MS, "ms"),
        Goal("longest script", slowest, "at_most", _LUA_GOAL_MS, "ms"),
        Goal("slowest list: p50", lists, "at_most", _LIST_GOAL_MS, "ms"),
        Goal("longest PING beside a large call: median", longest, "at_most", _PING_GOAL_MS, "ms"),
    )

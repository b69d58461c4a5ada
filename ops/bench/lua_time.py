"""Time of the state server in its scripts, for which all its other clients wait, by the number of models.

Each model has a session of its own and ten calls that wait. One more model has a long journal, which is deleted last.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import redis

from app import ids
from app.dispatch import train_queue
from app.domain.limits import PROJECT, Charge, Limits, Payer
from app.domain.records import Model, Sampler, Session
from app.domain.results import Result
from app.errors import LimitReached
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease

CALLS_A_MODEL = 10
_PROJECTS = 100
_MEASURED = 200
_LEASES = 100
_SENDERS = 8
_BASE = "bench/base"
Times = dict[str, dict[str, float]]


def measure(url: str, scales: Sequence[int], journal: int) -> tuple[dict[str, Times], Times, Times, Times]:
    """(by the number of models, the times of each script; the times of the scripts that delete a journal of so many
    calls, of those that concern a session of as many runs as the largest number of models, and of those that concern a
    project of as many sessions)."""
    with connect(url) as client:
        # Only the time in scripts is measured, which is the same.
        client.config_set("appendfsync", "no")
        client.config_set("latency-tracking-info-percentiles", "50 100")
        world = _World(client)
        found = {}
        for models in scales:
            world.grow(models)
            found[f"{models} models"] = dict(world.times())
        return found, world.deletion(journal), world.large_session(scales[-1]), world.many_sessions(scales[-1])


class _World:
    """Models on a state server, and the calls of the API and of workers."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis, settings = client, EngineSettings()
        self._oplog, self._lifecycle = RedisOpLog(client, settings), RedisLifecycle(client, settings)
        self._records, self._quotas = RedisRecords(client, settings), RedisQuotas(client, settings)
        self._model_ids: list[str] = []
        self._random = random.Random(0)

    def grow(self, models: int) -> None:
        with ThreadPoolExecutor(_SENDERS) as senders:
            self._model_ids += senders.map(self._add_model, range(len(self._model_ids), models))

    def _add_model(self, number: int) -> str:
        session, project = ids.new_session_id(), f"project-{number % _PROJECTS}"
        self._records.put_new(Session.namespace, session, dump(Session(project, time.time())))
        self._lifecycle.heartbeat(session)
        model_id = ids.model_id(session, 0)
        self._oplog.create_model(model_id, dump(Model(project, session, _BASE, time.time())))
        for seq in range(CALLS_A_MODEL):
            self._admit(model_id, seq)
        return model_id

    def _admit(self, model_id: str, seq: int) -> None:
        self._oplog.admit(model_id, seq, "optim_step", b"{}", str(seq))

    def times(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields each script's name and times. What it measures leaves every model with as many calls as before."""
        chosen = self._random.sample(self._model_ids, min(_MEASURED, len(self._model_ids)))
        leases: dict[str, Lease] = {}

        def acquire(model_id: str) -> None:
            lease = self._oplog.acquire(model_id, "bench/1")
            assert isinstance(lease, Lease)
            leases[model_id] = lease

        def next_seq(model_id: str) -> int:
            return leases[model_id].applied + 1

        yield "admit", self._each(chosen, lambda id_: self._admit(id_, self._seq_behind(id_)))
        yield "admit, repeated", self._each(chosen, lambda id_: self._admit(id_, self._seq_behind(id_) - 1))
        yield "acquire", self._each(chosen, acquire)
        yield "next", self._each(chosen, lambda id_: self._oplog.next(leases[id_], next_seq(id_)))
        result = Result(b"{}")
        yield "commit", self._each(chosen, lambda id_: self._oplog.commit(leases[id_], next_seq(id_), result))
        yield "renew", self._each(range(20), lambda _: self._oplog.renew(chosen[:_LEASES], "bench/1"))
        yield "heartbeat", self._each(chosen, lambda id_: self._lifecycle.heartbeat(id_.partition(":")[0]))
        queue = train_queue(_BASE)
        yield "pending", self._each(range(20), lambda _: self._oplog.pending(depth=1))
        yield "unowned", self._each(range(20), lambda _: self._oplog.unowned(queue))
        yield "expire", self._each(range(20), lambda _: self._lifecycle.expire())
        yield "release", self._each(chosen, lambda id_: self._oplog.release(id_, "bench/1"))

    def deletion(self, calls: int) -> Times:
        """The times of the scripts that delete a journal of so many calls."""
        model_id = self._add_model(0)
        for seq in range(CALLS_A_MODEL, calls):
            self._admit(model_id, seq)
        return {
            "end_model": self._each([model_id], self._lifecycle.end_model),
            "end_calls": self._each([model_id], lambda _: self._lifecycle.end_calls()),
        }

    def large_session(self, runs: int) -> Times:
        """The times of the scripts that concern all of so many runs and samplers of one session."""
        session = ids.new_session_id()
        self._records.put_new(Session.namespace, session, dump(Session("large", time.time())))
        self._lifecycle.heartbeat(session)
        fields = dump(Model("large", session, _BASE, time.time()))
        model_ids = [ids.model_id(session, number) for number in range(runs + _LEASES)]
        sampler = dump(Sampler("large", session, _BASE, time.time(), prefix="models/another/sampler_weights/e/1-1"))
        for number, model_id in enumerate(model_ids[:runs]):
            self._oplog.create_model(model_id, fields)
            self._records.put_new(Sampler.namespace, ids.sampling_session_id(session, number), sampler)

        def create(model_id: str, most: int = 2 * runs) -> None:
            charge = Charge((Payer(PROJECT, "large", Limits(live_models=most)),), models=1)
            self._oplog.admit(model_id, 0, "create_model", b"", "", fields, charge)

        def fail_to_create(_: int) -> None:
            with suppress(LimitReached):
                create(ids.model_id(session, 2 * runs), runs)

        def come_back(_: int) -> None:
            self._redis.zrem(keys.SESSIONS_HEARD, session)
            self._lifecycle.heartbeat(session)

        return {
            "admit a run": self._each(model_ids[runs:], create),
            "admit a run above the limit": self._each(range(5), fail_to_create),
            "used, of runs": self._each(range(5), lambda _: self._quotas.used(Payer(PROJECT, "large", Limits()))),
            "heartbeat of a session that ended": self._each(range(5), come_back),
            "move_session": self._each(["a", "b", "large"], lambda project: self._lifecycle.move(session, project)),
            "adapters": self._each(range(5), lambda _: self._lifecycle.adapters(model_ids[0])),
            "finish": self._each([session], lambda _: self._lifecycle.finish(session, "success")),
            "used, of runs of a session that ended": self._each(
                range(5), lambda _: self._quotas.used(Payer(PROJECT, "large", Limits()))
            ),
        }

    def many_sessions(self, sessions: int) -> Times:
        """The times of the scripts that concern all of so many sessions of one project."""

        def open_one(most: int) -> None:
            payer = Payer(PROJECT, "many", Limits(live_sessions=most))
            with suppress(LimitReached):
                session = dump(Session("many", time.time()))
                self._lifecycle.open(ids.new_session_id(), session, Charge((payer,), sessions=1))

        for _ in range(sessions):
            open_one(2 * sessions)
        hasty = RedisLifecycle(self._redis, EngineSettings(session_s=0.001))
        return {
            "open_session": self._each(range(20), lambda _: open_one(2 * sessions)),
            "open_session above the limit": self._each(range(5), lambda _: open_one(sessions)),
            "used, of sessions": self._each(range(5), lambda _: self._quotas.used(Payer(PROJECT, "many", Limits()))),
            "expire": self._each(range(5), lambda _: hasty.expire()),
        }

    def _seq_behind(self, model_id: str) -> int:
        """The seq after the model's last call: each measurement commits one call and admits one."""
        applied = int(self._redis.hget(f"tinsmith:models:{model_id}", "applied") or -1)
        return applied + 1 + int(self._redis.zcount(f"tinsmith:journal:{model_id}", f"({applied}", "+inf"))

    def _each(self, values: Any, call: Callable[[Any], object]) -> dict[str, float]:
        """Median and longest time of the scripts that the calls ran, in ms."""
        self._redis.config_resetstat()
        for value in values:
            call(value)
        found: Any = self._redis.info("latencystats")
        percentiles = found["latency_percentiles_usec_evalsha"]
        return {"p50_ms": percentiles["p50"] / 1000, "most_ms": percentiles["p100"] / 1000}

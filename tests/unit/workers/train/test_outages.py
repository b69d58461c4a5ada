"""A worker without a connection to the state server looks dead until it is back, and no Op suffers from that."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import redis

from app.domain.ops import ForwardBackward
from app.errors import Requeue
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from tests.faults.proxy import Proxy
from tests.unit.workers.conftest import MODEL, Worker, World, step
from workers.train.owner import MAX_ATTEMPTS

CUT_OFF = "b/1"


class CutOff:
    """A backend whose worker loses the connection to the state server during an Op, for longer than its leases."""

    def __init__(self, worker: Worker, world: World, proxy: Proxy) -> None:
        self._inner, self._world, self._proxy = worker.backend, world, proxy
        object.__setattr__(worker.runner._committer._executor, "backend", self)

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def apply(self, ops):
        if any(isinstance(op, ForwardBackward) for op in ops.values()):
            self._proxy.refuse()
            assert self._world.client.delete(keys.lease(MODEL), keys.lease(CUT_OFF)) == 2
        return self._inner.apply(ops)


@pytest.mark.parametrize("lives", [True, False])
def test_an_op_is_given_up_only_when_those_that_tried_it_are_dead(
    world: World, valkey: str, monkeypatch: pytest.MonkeyPatch, lives: bool
):
    monkeypatch.setattr("workers.train.scheduler._FIRST_PAUSE_S", 0.0)
    world.worker("a/1").handle(0)
    request = world.admit(1, step()[0])
    world.client.hset(keys.op(request), "attempts", MAX_ATTEMPTS - 1)
    world.client.delete(keys.lease(MODEL))
    with Proxy(valkey) as proxy:
        client = connect(proxy.url)
        behind = replace(world, oplog=RedisOpLog(client, world.settings), records=RedisRecords(client))
        cut_off = behind.worker(CUT_OFF)
        cut_off.parts.keeper._renew()
        CutOff(cut_off, world, proxy)
        with pytest.raises(Requeue, match="may or may not have happened"):
            cut_off.handle(1)
        successor = world.worker("c/1")
        for _ in range(2):
            with pytest.raises(Requeue, match="may still commit it"):
                successor.handle(1)
        if lives:
            proxy.go_on()
            cut_off.parts.keeper._renew()
        else:
            world.outlast(request)
        result = successor.handle(1)
    assert result is not None and result.failed == (not lives)


@pytest.mark.parametrize("during", ["its restore", "its pass", "a read of its pass"])
def test_an_op_that_was_left_in_an_outage_counts_no_later_death_of_its_worker(
    world: World, valkey: str, monkeypatch: pytest.MonkeyPatch, during: str
):
    world.worker("a/1").handle(0)
    request = world.admit(1, step()[0])
    with Proxy(valkey) as proxy:
        client = connect(proxy.url)
        behind = replace(world, oplog=RedisOpLog(client, world.settings), records=RedisRecords(client))
        for boot in range(MAX_ATTEMPTS):
            world.client.delete(keys.lease(MODEL))
            worker = behind.worker(f"b/{boot}")

            def cut_off(run, given):
                if during == "its restore" or any(isinstance(op, ForwardBackward) for op in given.values()):
                    proxy.refuse()
                if during == "a read of its pass":
                    client.ping()
                return run(given)

            with monkeypatch.context() as outage:
                owner, name = (worker.owner, "_restore") if during == "its restore" else (worker.backend, "apply")
                outage.setattr(owner, name, partial(cut_off, getattr(owner, name)))
                with pytest.raises((Requeue, redis.ConnectionError)):
                    worker.handle(1)
            proxy.go_on()
            worker.parts.keeper.put_offs.flush()
    successor = world.worker("c/1")
    world.client.delete(keys.lease(MODEL))
    result = successor.handle(1)
    assert result is not None and not result.failed
    assert world.client.hget(keys.op(request), "attempts") == b"0"

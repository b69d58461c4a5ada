"""The direct queue of a worker that is gone for good is deleted from the broker, and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from celery import Celery

from app.dispatch import Dispatcher, celery_app, direct_queue
from app.settings import EngineSettings, RedisSettings, Settings
from app.stores.redis.journal import RedisOpLog
from workers.maintenance.direct_queues import DirectQueues

QUEUE = "train.org/base"
GONE, LIVE = "trainer-0@gone", "trainer-0@live"


@pytest.fixture
def celery(client: redis.Redis, valkey: str, tmp_path: Path) -> Celery:
    """The broker is the state server's own database, so that `client` sees both."""
    return celery_app(Settings(data_dir=tmp_path, redis=RedisSettings(url=valkey, broker_url=valkey)))


class ReturningWorker(RedisOpLog):
    """A journal beside which a worker comes back once it was listed as silent, or just after its node was forgotten."""

    listed: Callable[[], object] = staticmethod(lambda: None)
    forgotten: Callable[[], object] = staticmethod(lambda: None)

    def silent_nodes(self) -> dict[str, str]:
        found = super().silent_nodes()
        self.listed()
        return found

    def forget_node(self, node: str, claim: str) -> bool:
        is_forgotten = super().forget_node(node, claim)
        self.forgotten()
        return is_forgotten


@pytest.fixture
def oplog(client: redis.Redis, celery: Celery) -> ReturningWorker:
    """Two workers, one of which is not heard any more. A message waits in the direct queue of each."""
    log = ReturningWorker(client, EngineSettings(lease_s=3600.0))
    for node in (GONE, LIVE):
        claim = json.dumps({"worker": f"{node}/boot", "queue": QUEUE})
        assert log.claim_node(node, f"{node}/boot", claim) == ""
        Dispatcher(celery).send("forward", "session:train:0:1", "session:train:0", direct_queue(QUEUE, node))
    log.release(f"{GONE}/boot", f"{GONE}/boot")
    return log


def queues(client: redis.Redis) -> set[str]:
    return {key.decode() for key in client.keys("*@*")}


def test_the_queue_of_a_worker_that_is_gone_is_deleted_with_its_bindings(
    client: redis.Redis, oplog: RedisOpLog, celery: Celery
):
    assert len([name for name in queues(client) if "@gone" in name]) > 1, "the queue and its bindings"
    kept = {name for name in queues(client) if "@live" in name}
    DirectQueues(oplog, celery, gone_s=0).sweep()
    assert queues(client) == kept
    assert client.hkeys("tinsmith:nodes") == [LIVE.encode()]


def test_a_worker_that_is_away_for_a_while_keeps_its_queue(client: redis.Redis, oplog: RedisOpLog, celery: Celery):
    before = queues(client)
    task = DirectQueues(oplog, celery)
    task.sweep()
    task._next = 0.0
    task.sweep()
    assert queues(client) == before


@pytest.mark.parametrize("moment", ["listed", "forgotten"])
def test_the_queue_of_a_worker_that_comes_back_meanwhile_keeps_its_bindings(
    client: redis.Redis, oplog: ReturningWorker, celery: Celery, moment: str
):
    queue = direct_queue(QUEUE, GONE)

    def comes_back() -> None:
        claim = json.dumps({"worker": f"{GONE}/later", "queue": QUEUE})
        assert oplog.claim_node(GONE, f"{GONE}/later", claim) == ""
        with celery.connection_for_write() as connection:
            celery.amqp.queues.new_missing(queue)(connection.default_channel).declare()

    setattr(oplog, moment, comes_back)
    DirectQueues(oplog, celery, gone_s=0).sweep()
    assert client.exists(f"_kombu.binding.{queue}")
    assert client.hexists("tinsmith:nodes", GONE)


def test_a_worker_that_is_heard_again_is_not_forgotten(oplog: RedisOpLog):
    claim = oplog.silent_nodes()[GONE]
    oplog.renew([], f"{GONE}/boot")
    assert not oplog.forget_node(GONE, claim)
    assert oplog.silent_nodes() == {}

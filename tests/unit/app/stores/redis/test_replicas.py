"""With engine.replicas, nothing is acknowledged that a failover could lose."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import redis

from app import ids
from app.domain.limits import FREE, Charge
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session
from app.errors import NotFound, NotReplicated, Unavailable
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.durability import CONFIRMED
from app.stores.redis.futures import RedisPayloads
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords, dump
from tests.sentinels import AT_ONCE, start_replica
from tests.servers import MAX_MEMORY, free_port, start_valkey
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, commit_through, own

SNAPSHOT, SAMPLER = f"models/{MODEL}/snapshots/0/0-1", "session:sample:0"
_CHECKPOINT = Checkpoint("me", MODEL, "weights", "base", "prefix", 0.0, 1, {}, [])
ENGINE = EngineSettings(lease_s=60, replicas=1)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    ports = free_port(), free_port()
    folder = tmp_path_factory.mktemp("replicas")
    with (
        start_valkey(folder / "a", ports[0], options=AT_ONCE) as primary,
        start_replica(folder / "b", ports) as replica,
    ):
        yield primary, replica


@pytest.fixture
def primary(urls: tuple[str, str]) -> Iterator[redis.Redis]:
    with connect(urls[0]) as client:
        client.flushall()
        yield client


@pytest.fixture
def replica(urls: tuple[str, str]) -> Iterator[redis.Redis]:
    with connect(urls[1]) as client:
        yield client


@pytest.fixture
def plain(primary: redis.Redis) -> RedisOpLog:
    """The journal of a process that waits for no replica."""
    log = RedisOpLog(primary, EngineSettings(lease_s=60))
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    RedisRecords(primary).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "session", "base", 0.0)))
    return log


@pytest.fixture
def oplog(primary: redis.Redis, plain: RedisOpLog) -> RedisOpLog:
    """The same journal, with engine.replicas."""
    return RedisOpLog(primary, ENGINE)


def _sample(log: RedisOpLog) -> None:
    log.admit_sample(f"{SAMPLER}:0", SAMPLER, "me", "sample.base", b"payload", "digest")


def _lifecycle(client: redis.Redis) -> RedisLifecycle:
    return RedisLifecycle(client, ENGINE)


def _records(client: redis.Redis) -> RedisRecords:
    return RedisRecords(client, ENGINE)


@contextmanager
def stopped(replica: redis.Redis) -> Iterator[None]:
    """The process of the replica is connected and does nothing: what is written meanwhile exists once."""
    process = replica.info("server")["process_id"]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_call_is_acknowledged_when_a_replica_has_it(oplog: RedisOpLog, replica: redis.Redis):
    with stopped(replica), pytest.raises(NotReplicated, match="fewer than 1 replicas"):
        admit(oplog, 0)
    again = oplog.admit(MODEL, 0, "forward_backward", b"payload 0", "digest 0")
    assert not again.fresh, "the call that was not acknowledged is there once"
    assert replica.hget(keys.future(again.request_id), "state") == b"pending"


def test_a_repeat_is_no_acknowledgement_either(oplog: RedisOpLog, urls: tuple[str, str], replica: redis.Redis):
    """It writes nothing, and so there is nothing that WAIT waits for by itself, least of all on a new connection."""
    with stopped(replica), connect(urls[0]) as client:
        with pytest.raises(NotReplicated):
            admit(oplog, 0)
        with pytest.raises(NotReplicated):
            admit(RedisOpLog(client, ENGINE), 0)
        with pytest.raises(NotReplicated):
            RedisOpLog(client, ENGINE).digest(ids.request_id(MODEL, 0))


def test_a_result_is_readable_when_a_replica_has_it(plain: RedisOpLog, oplog: RedisOpLog, replica: redis.Redis):
    request_id = admit(plain, 0)
    lease = own(oplog)
    with stopped(replica):
        assert oplog.future(request_id, {"me"}).result is None, "a call without a result waits for nothing"
        commit_through(oplog, lease, 0)
        with pytest.raises(NotReplicated):
            oplog.future(request_id, {"me"})
    assert oplog.future(request_id, {"me"}).result == OK
    assert replica.hget(keys.future(request_id), "state") == b"done"


def test_results_are_readable_when_the_state_server_is_full(oplog: RedisOpLog, primary: redis.Redis):
    request_id = admit(oplog, 0)
    commit_through(oplog, own(oplog), 0)
    primary.config_set("maxmemory", 1)
    try:
        assert oplog.future(request_id, {"me"}).result == OK
    finally:
        primary.config_set("maxmemory", MAX_MEMORY)


def test_a_server_that_forgot_the_scripts_is_sent_them_again(oplog: RedisOpLog, primary: redis.Redis):
    primary.script_flush()
    assert admit(oplog, 0) == ids.request_id(MODEL, 0)


WRITES: dict[str, Callable[[redis.Redis, RedisOpLog], object]] = {
    "admit": lambda client, log: admit(log, 1),
    "admit_sample": lambda client, log: _sample(log),
    "cancel_sample": lambda client, log: log.cancel_sample(f"{SAMPLER}:0"),
    "close_pages": lambda client, log: RedisPages(client, ENGINE).close(1),
    "create_model": lambda client, log: log.create_model("s:train:1", dump(Model("me", "s", "base", 0.0))),
    "delete": lambda client, log: _records(client).delete("samplers", SAMPLER),
    "delete_older": lambda client, log: _records(client).delete_older("me", [], [], {}),
    "delete_same": lambda client, log: _records(client).delete_same("samplers", SAMPLER, {}),
    "end_model": lambda client, log: _lifecycle(client).end_model(MODEL),
    "end_sampler": lambda client, log: _lifecycle(client).end_sampler(SAMPLER),
    "end_samplers": lambda client, log: _lifecycle(client).end_samplers([SAMPLER], retired=False),
    "end_unused_samplers": lambda client, log: _lifecycle(client).end_unused_samplers([SAMPLER]),
    "finish": lambda client, log: _lifecycle(client).finish("s", "done"),
    "forget": lambda client, log: _lifecycle(client).forget("s"),
    "give_up_adapters": lambda client, log: _lifecycle(client).give_up_adapters([SAMPLER]),
    "join": lambda client, log: _records(client).join(SAMPLER),
    "move_session": lambda client, log: _lifecycle(client).move("s", "you"),
    "note": lambda client, log: _records(client).note("audit", "me", "key", "text"),
    "open_session": lambda client, log: _lifecycle(client).open("s", dump(Session("me", 0.0)), FREE),
    "put_loss": lambda client, log: _records(client).put_loss("l", Loss("me", "s", 0.0, ""), 1),
    "put_new": lambda client, log: _records(client).put_new("uploads", "u", {"a": "1"}),
    "put_newer": lambda client, log: _records(client).put_newer("keys", "k", 1, {"version": "1"}),
    "put_reserved": lambda client, log: _records(client).put_reserved("p", _CHECKPOINT),
    "refuse": lambda client, log: log.refuse(MODEL, 1, "wrong"),
    "set_snapshot": lambda client, log: log.set_snapshot(own(log), 0, SNAPSHOT),
    "spill_garbage": lambda client, log: RedisPayloads(client, ENGINE, None).remove_garbage(),
    "reserve": lambda client, log: RedisQuotas(client, ENGINE).reserve("p", Charge((), stores=True, stored=1), 60),
    "update": lambda client, log: _records(client).update("samplers", SAMPLER, {"a": "1"}),
    "update_same": lambda client, log: _records(client).update_same("samplers", SAMPLER, ("a", "1"), {"b": "1"}),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_client_or_the_object_store_relies_on_waits_for_a_replica(
    primary: redis.Redis, plain: RedisOpLog, oplog: RedisOpLog, name: str
):
    admit(plain, 0)
    commit_through(plain, own(plain), 0)
    before = int(primary.get(keys.PREFIX + "marks") or 0)
    with suppress(Unavailable, NotFound):  # no room was reserved, there is no session, or the machine is slow
        WRITES[name](primary, oplog)
    assert int(primary.get(keys.PREFIX + "marks") or 0) > before, "each mark is followed by its WAIT"


def test_every_such_write_is_among_these():
    assert set(WRITES) == CONFIRMED


def test_a_snapshot_replaces_the_one_before_it_when_a_replica_knows_it(
    plain: RedisOpLog, oplog: RedisOpLog, replica: redis.Redis
):
    admit(plain, 0)
    lease = own(oplog)
    commit_through(oplog, lease, 0)
    with stopped(replica), pytest.raises(NotReplicated):
        oplog.set_snapshot(lease, 0, SNAPSHOT)

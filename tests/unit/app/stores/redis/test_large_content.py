"""Calls and results of megabytes: no command of theirs is large, and what is refused is not written at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from app.domain.limits import PROJECT, Charge, Limits, Payer
from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.errors import Fenced, RequestError, TooLarge, Unavailable
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.payloads import PIECE_BYTES, RedisPayloads, Staging
from app.stores.redis.records import RedisRecords, dump
from tests.servers import MAX_MEMORY
from tests.unit.app.stores.redis.journal_steps import MODEL, own
from workers.maintenance.spilling import PayloadSpilling

SAMPLER = "session:sample:0"
CONTENT = random.Random(0).randbytes(3 * PIECE_BYTES + 5)
LARGE = Result(CONTENT)
SETTINGS = EngineSettings(lease_s=60.0)
NO_BYTES = 4096
RATE = Charge((Payer(PROJECT, "me", Limits(requests_per_s=1.0)),))


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path, "", "")


@pytest.fixture
def oplog(client: redis.Redis, store: FolderStore) -> RedisOpLog:
    log = RedisOpLog(client, SETTINGS, store)
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    RedisRecords(client).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "session", "base", 0.0)))
    return log


@pytest.fixture
def payloads(client: redis.Redis, store: FolderStore) -> RedisPayloads:
    return RedisPayloads(client, SETTINGS, store)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the commands, or pipelines of them, that are sent."""
    sizes: list[int] = []
    send = redis.Connection.send_packed_command

    def recorded(self: redis.Connection, command: bytes | list[bytes], *options: Any, **more: Any) -> None:
        sizes.append(len(command) if isinstance(command, bytes) else sum(map(len, command)))
        send(self, command, *options, **more)

    monkeypatch.setattr(redis.Connection, "send_packed_command", recorded)
    return sizes


def admit(oplog: RedisOpLog, seq: int = 0, content: bytes = CONTENT, charge: Charge | None = None) -> str:
    more = {} if charge is None else {"charge": charge}
    return oplog.admit(MODEL, seq, "forward_backward", content, f"{len(content)}", **more).request_id


def admit_sample(oplog: RedisOpLog, seq: int = 0) -> str:
    return oplog.admit_sample(f"{SAMPLER}:{seq}", SAMPLER, "me", "sample.base", CONTENT, "digest").request_id


def calls(client: redis.Redis, *commands: str) -> int:
    """The number of runs of these commands since the last look, also in scripts."""
    found = client.info("commandstats")
    client.config_resetstat()
    return sum(found.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in commands)


def test_no_command_of_a_large_call_or_result_carries_more_than_a_piece(oplog: RedisOpLog, sent: list[int]):
    request, sample = admit(oplog), admit_sample(oplog)
    oplog.commit(own(oplog), 0, LARGE)
    assert oplog.claim_sample(sample, "a/1")
    assert oplog.finish_sample(sample, LARGE)
    assert [oplog.future(each, {"me"}).result for each in (request, sample)] == [LARGE, LARGE]
    assert sum(sent) > 4 * len(CONTENT)
    assert max(sent) < PIECE_BYTES + NO_BYTES


def test_no_answer_of_the_server_carries_more_than_a_piece(oplog: RedisOpLog, client: redis.Redis):
    request, sample = admit(oplog), admit_sample(oplog)
    lease = own(oplog)
    calls(client)
    for read in (
        lambda: oplog.next(lease, 0),
        lambda: oplog.entry(MODEL, 0),
        lambda: oplog.entries(MODEL, range(1))[0],
        lambda: oplog.claim_sample(sample, "a/1"),
    ):
        entry = read()
        assert entry is not None and entry.payload == CONTENT
        assert (calls(client, "getrange"), calls(client, "get", "mget")) == (4, 0)
    oplog.commit(lease, 0, LARGE)
    calls(client)
    assert oplog.future(request, {"me"}).result == LARGE
    assert calls(client, "getrange") == 4
    assert not client.hexists(keys.future(request), "body")


def test_a_call_that_is_refused_or_repeated_is_not_sent(oplog: RedisOpLog, client: redis.Redis, sent: list[int]):
    request = admit(oplog, charge=RATE)
    sample = admit_sample(oplog)
    oplog.refuse(MODEL, 1, "wrong")
    client.hset("tinsmith:rates:project:me", mapping={"requests": 10**12, "requests_at": 0})
    sent.clear()
    assert (admit(oplog, charge=RATE), admit_sample(oplog)) == (request, sample)
    refused: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: admit(oplog, 0, CONTENT[1:]), "other content"),
        (lambda: admit(oplog, 1), "was refused"),
        (lambda: admit(oplog, 5000), "missing"),
        (lambda: admit(oplog, 3, charge=RATE), "requests_per_s"),
    )
    for call, reason in refused:
        with pytest.raises(RequestError, match=reason):
            call()
    oplog.take_none("the disk is nearly full", 600)
    for call in (lambda: admit(oplog, 3), lambda: admit_sample(oplog, 3)):
        with pytest.raises(Unavailable, match="nearly full"):
            call()
    assert sum(sent) < PIECE_BYTES
    assert client.keys("*staged*") == []


def test_a_large_call_is_charged_once(oplog: RedisOpLog, client: redis.Redis):
    admit(oplog, 0, b"small", RATE)
    admit(oplog, 1, CONTENT, RATE)
    assert 1 < float(client.hget("tinsmith:rates:project:me", "requests")) <= 2


def test_a_call_whose_first_pieces_have_lapsed_is_not_admitted(
    oplog: RedisOpLog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    write = Staging.write
    monkeypatch.setattr(Staging, "write", lambda self, key, content: write(self, key, content[PIECE_BYTES:]))
    for call in (admit, admit_sample):
        with pytest.raises(Unavailable, match="took so long that its stored content has expired"):
            call(oplog)
    assert oplog.entry(MODEL, 0) is None
    assert client.keys("*staged*") == [] == client.keys(keys.payload("*"))


def test_a_result_whose_first_pieces_have_lapsed_is_delivered_again(
    oplog: RedisOpLog, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    request, sample, lease = admit(oplog), admit_sample(oplog), own(oplog)
    write = Staging.write
    with monkeypatch.context() as slow:
        slow.setattr(Staging, "write", lambda self, key, content: write(self, key, content[PIECE_BYTES:]))
        for deliver in (lambda: oplog.commit(lease, 0, LARGE), lambda: oplog.finish_sample(sample, LARGE)):
            with pytest.raises(Unavailable, match="took so long to write"):
                deliver()
    assert [oplog.future(each, {"me"}).state for each in (request, sample)] == ["pending", "pending"]
    oplog.commit(lease, 0, LARGE)
    assert oplog.finish_sample(sample, LARGE)
    assert [oplog.future(each, {"me"}).result for each in (request, sample)] == [LARGE, LARGE]


def test_a_process_that_dies_while_it_writes_leaves_a_key_that_expires(client: redis.Redis):
    staging = Staging(client)
    _, key, _ = staging.place(CONTENT)
    staging.write(key, CONTENT[:PIECE_BYTES])
    assert 0 < client.ttl(key) <= 600


def test_a_result_that_does_not_count_leaves_nothing_behind(oplog: RedisOpLog, client: redis.Redis):
    admit(oplog)
    sample, former = admit_sample(oplog), own(oplog)
    own(oplog, "a/2")
    with pytest.raises(Fenced):
        oplog.commit(former, 0, LARGE)
    assert oplog.finish_sample(sample, Result(b"first"))
    assert not oplog.finish_sample(sample, LARGE)
    assert client.keys("*staged*") == [] == client.keys("*result:*")


def test_a_full_server_takes_large_results_of_what_runs(oplog: RedisOpLog, client: redis.Redis):
    request, sample, lease = admit(oplog), admit_sample(oplog), own(oplog)
    client.config_set("maxmemory", 1)
    try:
        oplog.commit(lease, 0, LARGE)
        assert oplog.finish_sample(sample, LARGE)
    finally:
        client.config_set("maxmemory", MAX_MEMORY)
    assert [oplog.future(each, {"me"}).result for each in (request, sample)] == [LARGE, LARGE]


def test_a_large_result_expires_with_its_future(oplog: RedisOpLog, client: redis.Redis):
    request, sample = admit(oplog), admit_sample(oplog)
    oplog.commit(own(oplog), 0, LARGE)
    oplog.finish_sample(sample, LARGE)
    for read in (False, True):
        for each in (request, sample):
            ends = client.pexpiretime(keys.future(each)), client.pexpiretime(keys.result(each))
            assert ends[0] == ends[1] > 0
            if not read:
                oplog.future(each, {"me"})


def take_calls_as_an_earlier_version(client: redis.Redis) -> None:
    client.set(keys.TAKING_CALLS, "", px=10_000)


def test_beside_an_api_of_an_earlier_version_a_large_result_lies_where_that_one_reads_it(
    oplog: RedisOpLog, client: redis.Redis
):
    request, sample = admit(oplog), admit_sample(oplog)
    take_calls_as_an_earlier_version(client)
    oplog.commit(own(oplog), 0, LARGE)
    oplog.take_calls(10)
    assert oplog.finish_sample(sample, LARGE)
    assert [client.hget(keys.future(each), "body") for each in (request, sample)] == [CONTENT, CONTENT]
    assert [oplog.future(each, {"me"}).result for each in (request, sample)] == [LARGE, LARGE]


def test_a_large_result_comes_in_pieces_again_once_the_earlier_api_has_gone(oplog: RedisOpLog, client: redis.Redis):
    take_calls_as_an_earlier_version(client)
    for _ in range(2):
        oplog.take_calls(10)
    assert 0 < client.pttl(keys.EARLIER_API) <= 10_000
    client.delete(keys.EARLIER_API)  # it expires
    request = admit(oplog)
    oplog.commit(own(oplog), 0, LARGE)
    assert client.exists(keys.result(request)) and not client.hexists(keys.future(request), "body")


def test_a_result_that_a_leader_of_an_earlier_version_left_is_moved(
    oplog: RedisOpLog, client: redis.Redis, payloads: RedisPayloads
):
    request = admit(oplog)
    oplog.commit(own(oplog), 0, LARGE)
    client.srem("tinsmith:results_due", request)  # it looks for a `body`, finds none and takes the result for expired
    PayloadSpilling(payloads).sweep()
    assert not client.exists(keys.result(request))
    assert oplog.future(request, {"me"}).result == LARGE


def test_a_large_result_moves_to_the_object_store_also_while_it_is_read(
    oplog: RedisOpLog, client: redis.Redis, payloads: RedisPayloads, monkeypatch: pytest.MonkeyPatch
):
    moved, read = admit(oplog), admit(oplog, 1)
    for seq in range(2):
        oplog.commit(own(oplog), seq, LARGE)
    assert payloads.spill_result(moved)
    assert client.keys(keys.result("*")) == [keys.result(read).encode()]
    _meanwhile(monkeypatch, lambda: payloads.spill_result(read))
    assert [oplog.future(each, {"me"}).result for each in (read, moved)] == [LARGE, LARGE]
    assert client.keys(keys.result("*")) == []


def test_a_large_call_moves_to_the_object_store_also_while_it_is_read(
    oplog: RedisOpLog, payloads: RedisPayloads, monkeypatch: pytest.MonkeyPatch
):
    request = admit(oplog)
    _meanwhile(monkeypatch, lambda: payloads.spill(request))
    entry = oplog.entry(MODEL, 0)
    assert entry is not None and entry.payload == CONTENT


def _meanwhile(monkeypatch: pytest.MonkeyPatch, move: Callable[[], object]) -> None:
    """Runs `move` once, between the first two pieces of the next read."""
    piece, state = Staging._piece, SimpleNamespace(moved=False)

    def between(self: Staging, key: str, start: int) -> bytes:
        if start and not state.moved:
            state.moved = True
            move()
        return piece(self, key, start)

    monkeypatch.setattr(Staging, "_piece", between)


def test_a_large_call_of_a_run_that_has_ended_is_not_sent(oplog: RedisOpLog, client: redis.Redis, sent: list[int]):
    RedisLifecycle(client, SETTINGS).end_model(MODEL)
    sent.clear()
    with pytest.raises(RequestError, match="has ended"):
        admit(oplog)
    with pytest.raises(TooLarge, match="split it"):
        RedisOpLog(client, EngineSettings(payload_budget_bytes=PIECE_BYTES)).admit(MODEL, 1, "forward", CONTENT, "")
    assert sum(sent) < PIECE_BYTES

"""The journal of a model has bounds, on a real server."""

from __future__ import annotations

import pytest

from app.domain.records import Model
from app.domain.results import Result
from app.errors import BadRequest, Gone, Unavailable
from app.settings import EngineSettings
from app.stores.objects.folder import FolderStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import dump
from tests.unit.app.stores.redis.journal_steps import MODEL, admit, commit_through, own

MOST_MISSING = MOST_REFUSED = 1024
LONG, TRIMMED, DOOMED = 2_100, 50, 200


def size(client) -> int:
    return client.dbsize()


def test_a_call_that_leaves_too_many_others_missing_is_a_400_and_stores_nothing(oplog, client):
    admit(oplog, 0)
    before = size(client)
    for seq in (MOST_MISSING + 2, 10**6, 2**31 - 1):
        with pytest.raises(BadRequest, match=f"seq_id {seq} leaves more than 1024 earlier seq_ids"):
            admit(oplog, seq)
    assert size(client) == before


def test_a_refused_call_that_leaves_too_many_others_missing_stores_nothing(oplog, client):
    admit(oplog, 0)
    before = size(client)
    for seq in (MOST_MISSING + 2, 2**31 - 1):
        assert not oplog.refuse(MODEL, seq, "why", "lost_batch")
    assert size(client) == before
    assert oplog.refuse(MODEL, MOST_MISSING + 1, "why", "lost_batch")


def fail_creation(oplog) -> None:
    admit(oplog, 0, "create_model")
    oplog.commit(own(oplog), 0, Result.failure("why"))


def test_a_model_whose_creation_failed_takes_no_calls_and_its_journal_does_not_grow(oplog, client):
    fail_creation(oplog)
    before = size(client)
    for seq in (1, 2, 5, MOST_MISSING + 2):
        with pytest.raises(Gone, match="the creation of this model failed, so it takes no calls; create a new model"):
            admit(oplog, seq)
        assert not oplog.refuse(MODEL, seq, "why", "lost_batch")
    assert (size(client), client.zcard(keys.journal(MODEL))) == (before, 1)
    assert not oplog.admit(MODEL, 0, "create_model", b"payload 0", "digest 0").fresh, "the failed call is known"
    with pytest.raises(BadRequest, match="used before with other content"):
        admit(oplog, 0, "create_model", "other content")


def test_calls_that_were_sent_before_the_creation_failed_are_answered_one_by_one(oplog):
    admit(oplog, 2)
    admit(oplog, 4)
    fail_creation(oplog)
    assert not oplog.admit(MODEL, 2, "forward_backward", b"payload 2", "digest 2").fresh
    admit(oplog, 1)
    assert oplog.refuse(MODEL, 3, "why", "lost_batch"), "the call behind it waits for it"
    with pytest.raises(Gone):
        admit(oplog, 5)
    lease = own(oplog)
    for seq in range(1, 5):
        oplog.commit(lease, seq, Result.failure("the model is not loaded"))
    with pytest.raises(Gone):
        admit(oplog, 5)


def notes(client) -> int:
    return sum(client.hexists(key, "refused") for key in client.scan_iter(keys.future("*"), count=10_000))


def test_a_model_keeps_the_notes_of_its_last_refused_calls_only(oplog, client):
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, Result(b"{}"))
    for seq in range(1, MOST_REFUSED + 11):
        assert oplog.refuse(MODEL, seq, "why", "lost_batch")
        oplog.commit(lease, seq, Result(b"{}"))
    assert notes(client) == MOST_REFUSED
    with pytest.raises(BadRequest, match="seq_id 11 was refused: why"):
        admit(oplog, 11)
    with pytest.raises(BadRequest, match="seq_id 10 of this model was used before"):
        admit(oplog, 10)
    assert oplog.outcome(f"{MODEL}:0"), "the future of a call that ran stays"


def test_few_refused_calls_wait_for_a_worker(oplog, client):
    assert all(oplog.refuse(MODEL, seq, "why", "lost_batch") for seq in range(MOST_REFUSED))
    for seq in range(MOST_REFUSED, MOST_REFUSED + 3):
        with pytest.raises(Unavailable, match="1024 refused calls of this model wait"):
            oplog.refuse(MODEL, seq, "why", "lost_batch")
    assert (ops_left(client), notes(client)) == (MOST_REFUSED, MOST_REFUSED)
    admit(oplog, MOST_REFUSED + 1, "optim_step")
    with pytest.raises(Unavailable):  # what waits behind it frees nothing while the worker is away
        oplog.refuse(MODEL, MOST_REFUSED, "why", "lost_batch")
    with pytest.raises(BadRequest, match="seq_id 0 was refused: why"):
        admit(oplog, 0)
    oplog.commit(own(oplog), 0, Result(b"{}"))
    assert oplog.refuse(MODEL, MOST_REFUSED, "why", "lost_batch")
    with pytest.raises(Unavailable):
        oplog.refuse(MODEL, MOST_REFUSED + 2, "why", "lost_batch")


def test_the_reason_of_a_refused_call_is_kept_cut(oplog, client):
    admit(oplog, 1)
    assert oplog.refuse(MODEL, 0, "long " * 10**5, "lost_batch")
    assert len(oplog.entry(MODEL, 1).doomed) == 1000
    held = [key for seq in (0, 1) for key in (keys.op(f"{MODEL}:{seq}"), keys.future(f"{MODEL}:{seq}"))]
    assert all(client.memory_usage(key) < 3000 for key in held)


def test_the_parts_of_a_large_call_may_come_before_its_first_part(oplog):
    admit(oplog, 0)
    for seq in range(MOST_MISSING + 1, 1, -1):
        admit(oplog, seq)
    admit(oplog, 1)


def test_calls_that_wait_in_a_row_are_not_missing(oplog, client):
    """A client may send any number of calls before the first one has run."""
    client.zadd(keys.journal(MODEL), {str(seq): seq for seq in range(5 * MOST_MISSING)})
    admit(oplog, 5 * MOST_MISSING)


def fill(client, most: int) -> None:
    """Journals calls up to seq `most` without their contents, of which all wait."""
    with client.pipeline(transaction=False) as pipe:
        for seq in range(most + 1):
            request = f"{MODEL}:{seq}"
            pipe.hset(keys.op(request), mapping={"kind": "create_model" if seq % 500 == 0 else "forward"})
            pipe.hset(keys.future(request), "state", "pending")
        pipe.zadd(keys.journal(MODEL), {str(seq): seq for seq in range(most + 1)})
        pipe.execute()


def ops_left(client) -> int:
    return sum(1 for _ in client.scan_iter(keys.op("*"), count=10_000))


def test_a_long_journal_is_trimmed_in_slices(oplog, client):
    fill(client, LONG)
    client.hset(keys.model(MODEL), "applied", LONG)
    lease = own(oplog)
    assert oplog.set_snapshot(lease, LONG - 1, "models/m/snapshots/1") == ""
    assert ops_left(client) == LONG + 1 - TRIMMED, "one step deletes no more"
    oplog.trim(MODEL)
    assert client.zrange(keys.journal(MODEL), 0, -1) == [str(LONG).encode()]
    assert ops_left(client) == 1


def test_a_long_journal_of_an_ended_model_is_deleted_in_slices_and_all_its_calls_fail(oplog, client):
    lifecycle = RedisLifecycle(client, EngineSettings())
    fill(client, LONG)
    assert lifecycle.end_model(MODEL) is not None
    assert ops_left(client) == LONG + 1 - TRIMMED, "one step deletes no more"
    lifecycle.end_calls()
    assert (ops_left(client), client.exists(keys.journal(MODEL)), client.exists("tinsmith:ending")) == (0, 0, 0)
    assert all(oplog.outcome(f"{MODEL}:{seq}").failed for seq in range(LONG + 1))


def test_the_loads_of_a_long_journal_are_read_in_slices(oplog, client):
    lifecycle = RedisLifecycle(client, EngineSettings())
    fill(client, LONG)
    loads = list(lifecycle.loads([MODEL]))  # now the server knows the script
    assert loads == [(MODEL, seq) for seq in range(0, LONG + 1, 500)]
    client.config_resetstat()
    assert list(lifecycle.loads([MODEL])) == loads
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= LONG / 1000


@pytest.mark.parametrize("kind", ["forward_backward", "forward"])
def test_the_many_calls_behind_a_lost_gradient_are_doomed_in_slices(oplog, client, kind):
    """No call of the window runs, however many wait, and none behind its optim_step is doomed."""
    last = DOOMED + 20
    kinds = ["forward_backward", *[kind] * (last - 1), "optim_step", "forward"]
    for seq, each in enumerate(kinds):
        admit(oplog, seq, each)
    lease, bad = own(oplog), Result(b"{}", failed=True)
    oplog.commit(lease, 0, bad, why="infinite")
    assert sum(bool(oplog.entry(MODEL, seq).doomed) for seq in range(1, last + 2)) == DOOMED
    for seq in range(1, last + 1):
        assert oplog.entry(MODEL, seq).doomed == "infinite"
        oplog.commit(lease, seq, bad, why="it was doomed")
    assert oplog.entry(MODEL, last + 1).doomed == ""


def test_a_lost_batch_dooms_in_slices_too(oplog):
    for seq in range(1, DOOMED + 20):
        admit(oplog, seq)
    oplog.refuse(MODEL, 0, "too long", "lost_batch")
    lease = own(oplog)
    oplog.commit(lease, 0, Result(b"{}"))
    for seq in range(1, DOOMED + 20):
        assert oplog.entry(MODEL, seq).doomed == "too long"
        oplog.commit(lease, seq, Result(b"{}", failed=True), why="it was doomed")


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_replay_reads_no_op_that_is_trimmed_meanwhile(client, tmp_path, monkeypatch, count: int, spilled: bool):
    store = FolderStore(tmp_path, "", "")
    oplog = RedisOpLog(client, EngineSettings(), store)
    oplog.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    for seq in range(count):
        admit(oplog, seq)
    lease = own(oplog)
    commit_through(oplog, lease, count - 1)
    last = f"{MODEL}:{count - 1}"
    assert not spilled or RedisPayloads(client, EngineSettings(), store).spill(last)
    get, mget = oplog._payloads.get, client.mget

    def trimmed_first(read):
        client.delete(keys.op(last), keys.payload(last))
        return read

    monkeypatch.setattr(oplog._payloads, "get", lambda each: trimmed_first(get)(each))
    monkeypatch.setattr(oplog._redis, "mget", lambda names: trimmed_first(mget)(names))
    assert [entry.seq for entry in oplog.entries(MODEL, range(count))] == list(range(count - 1))


def test_a_replay_reads_few_bytes_at_once(client, tmp_path, monkeypatch):
    monkeypatch.setattr("app.stores.redis.journal._AT_ONCE", 8)
    monkeypatch.setattr("app.stores.redis.journal._AT_ONCE_BYTES", 20_000)
    oplog = RedisOpLog(client, EngineSettings(), FolderStore(tmp_path, "", ""))
    oplog.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    sizes = [1] * 9 + [9_000] * 3 + [50_000] * 2 + [5_000] * 3
    for seq, length in enumerate(sizes):
        oplog.admit(MODEL, seq, "forward_backward", bytes([seq]) * length, f"d{seq}")
    assert RedisPayloads(client, EngineSettings(), FolderStore(tmp_path, "", "")).spill(f"{MODEL}:15")
    read = []
    while len(read) < len(sizes):
        handful = oplog.entries(MODEL, range(len(read), 100))
        assert len(handful) == 1 or sum(len(entry.payload) for entry in handful) <= 20_000
        read += handful
    assert read == [oplog.entry(MODEL, seq) for seq in range(len(sizes))]
    assert [len(oplog.entries(MODEL, range(at, 100))) for at in (0, 8, 9, 12, 14, 15, 16, 17)] == [
        8,
        3,
        2,
        1,
        1,
        1,
        1,
        0,
    ]

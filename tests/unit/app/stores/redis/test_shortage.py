"""Calls while a disk is nearly full: new ones are refused and leave nothing on it."""

from __future__ import annotations

import pytest
import redis

from app.errors import Unavailable
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords
from tests.servers import MAX_MEMORY
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, own

SAMPLE = "s:sample:0:1"
LARGE = 200 * 1024
LET_IN = 16 * 2**20


def admit(oplog: RedisOpLog, seq: int, size: int = 8) -> str:
    return oplog.admit(MODEL, seq, "forward_backward", b"x" * size, f"digest {seq}").request_id


def test_no_new_call_is_admitted_while_a_disk_is_nearly_full(oplog: RedisOpLog, client: redis.Redis):
    admit(oplog, 2)
    oplog.take_none("the disk of data_dir has 9 MiB free", 3600.0)
    for refused in (
        lambda: admit(oplog, 3),
        lambda: oplog.admit_sample(SAMPLE, SAMPLE.rpartition(":")[0], "me", "sample.base", b"prompt", "digest"),
        lambda: RedisRecords(client).put_new("sessions", "new", {"owner": '"me"'}),
    ):
        with pytest.raises(Unavailable, match="the disk of data_dir has 9 MiB free; try again soon"):
            refused()
    assert oplog.shortage() == "the disk of data_dir has 9 MiB free"
    assert admit(oplog, 2), "a repeat"
    assert admit(oplog, 0), "the call for which another one waits"
    client.delete(keys.SHORTAGE)
    assert admit(oplog, 3)


def test_one_call_far_ahead_lets_few_bytes_in_while_a_disk_is_nearly_full(oplog: RedisOpLog, client: redis.Redis):
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    admit(oplog, 1000)
    size = LET_IN // 4
    for first in (1, 6):
        oplog.take_none("the disk is nearly full", 3600.0)
        for seq in range(first, first + 4):
            assert admit(oplog, seq, size), "the call at 1000 waits for it"
            oplog.commit(lease, seq, OK)
        with pytest.raises(Unavailable):
            admit(oplog, first + 4, size)
        client.delete(keys.SHORTAGE)
        assert admit(oplog, first + 4, size), "there is room again"
        oplog.commit(lease, first + 4, OK)


def test_a_refused_call_stores_nothing_without_room_and_no_step_runs_on_part_of_its_gradients(
    oplog: RedisOpLog, client: redis.Redis
):
    admit(oplog, 0)
    oplog.take_none("the disk is nearly full", 3600.0)
    before = client.dbsize()
    for seq in (1, 2):
        with pytest.raises(Unavailable, match="the disk is nearly full"):
            oplog.refuse(MODEL, seq, "too long", "lost_batch")
    assert client.dbsize() == before
    client.delete(keys.SHORTAGE)
    oplog.admit(MODEL, 3, "optim_step", b"step", "digest 3")
    oplog.take_none("the disk is nearly full", 3600.0)
    with pytest.raises(Unavailable):  # the step waits for another call too
        oplog.refuse(MODEL, 2, "too long", "lost_batch")
    for seq in (1, 2):
        assert oplog.refuse(MODEL, seq, "it never came", "drop_gradients"), "a gap needs no room"
    assert oplog.entry(MODEL, 3).doomed == "it never came"


def test_a_refused_call_is_noted_in_a_full_memory_only_if_others_wait_for_it(oplog: RedisOpLog, client: redis.Redis):
    admit(oplog, 2)
    client.config_set("maxmemory", 1)
    try:
        for seq in (1, 3):
            with pytest.raises(Unavailable):
                oplog.refuse(MODEL, seq, "too long", "lost_batch")
        for seq in (0, 1):
            assert oplog.refuse(MODEL, seq, "too long", "lost_batch")
        with pytest.raises(Unavailable):
            oplog.refuse(MODEL, 3, "too long", "lost_batch")
    finally:
        client.config_set("maxmemory", MAX_MEMORY)
    assert [oplog.entry(MODEL, seq).kind for seq in (0, 1, 2)] == ["lost_batch", "lost_batch", "forward_backward"]
    assert oplog.entry(MODEL, 2).doomed == "too long"


def test_what_keeps_sessions_and_refusals_going_is_noted_in_a_full_memory(oplog: RedisOpLog, client: redis.Redis):
    lifecycle = RedisLifecycle(client, EngineSettings(orphan_s=0.001))
    client.config_set("maxmemory", 1)
    try:
        oplog.take_calls(600)
        oplog.take_none("the disk is nearly full", 600)
        lifecycle.overdue(["objects/a"])
        assert client.zrange(keys.ORPHANS, 0, -1) == [b"objects/a"]
        assert client.exists(keys.TAKING_CALLS)
        assert client.get(keys.SHORTAGE) == b"the disk is nearly full"
    finally:
        client.config_set("maxmemory", MAX_MEMORY)


def test_a_large_call_that_is_refused_is_not_written_to_disk(oplog: RedisOpLog, client: redis.Redis):
    admit(oplog, 2, LARGE)
    oplog.take_none("the disk is nearly full", 3600.0)
    before = client.info("persistence")["aof_current_size"]
    for _ in range(3):
        with pytest.raises(Unavailable):
            admit(oplog, 3, LARGE)
    assert admit(oplog, 2, LARGE), "a repeat"
    assert client.info("persistence")["aof_current_size"] - before < LARGE // 2

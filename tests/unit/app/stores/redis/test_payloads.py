"""Payloads: their size is counted exactly, new work over the limit is refused for now, and spilled ones come back."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from app.domain.records import Model, Sampler
from app.domain.results import Result
from app.errors import BadRequest, Fenced, TooLarge, Unavailable
from app.settings import EngineSettings
from app.stores.objects.base import ObjectStore
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.payloads import RedisPayloads
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease
from tests.unit.away_store import AwayStore

MODEL = "session:train:0"
SAMPLER = "session:sample:0"
OK = Result(b"{}")
KB = 1024
SETTINGS = EngineSettings(payload_budget_bytes=400 * KB, spill_bytes=100 * KB)


@pytest.fixture
def store(tmp_path: Path) -> AwayStore:
    return AwayStore(tmp_path, "secret", "http://x")


@pytest.fixture
def oplog(client: redis.Redis, store: AwayStore) -> RedisOpLog:
    log = RedisOpLog(client, SETTINGS, store)
    assert log.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
    RedisRecords(client).put_new(Sampler.namespace, SAMPLER, dump(Sampler("me", "session", "base", 0.0)))
    return log


@pytest.fixture
def payloads(client: redis.Redis, store: AwayStore) -> RedisPayloads:
    return RedisPayloads(client, SETTINGS, store)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spiller that takes an unfinished attempt for dead at once."""
    monkeypatch.setattr("app.stores.redis.payloads._ABANDONED_MS", 0)


def content(seq: int, size: int) -> bytes:
    return random.Random(seq).randbytes(size)


def admit(oplog: RedisOpLog, seq: int, size: int, kind: str = "forward_backward") -> str:
    return oplog.admit(MODEL, seq, kind, content(seq, size), f"digest {seq} {size}").request_id


def admit_sample(oplog: RedisOpLog, seq: int, size: int) -> str:
    request_id = f"{SAMPLER}:{seq}"
    oplog.admit_sample(request_id, SAMPLER, "me", "sample.base", content(seq, size), f"digest {seq}")
    return request_id


def own(oplog: RedisOpLog, worker: str = "a/1") -> Lease:
    lease = oplog.acquire(MODEL, worker)
    assert isinstance(lease, Lease)
    return lease


def counted(client: redis.Redis) -> int:
    return int(client.get("tinsmith:payload_bytes") or 0)


def held(client: redis.Redis) -> dict[str, int]:
    found = client.keys(keys.payload("*"))
    return {key.decode().removeprefix(keys.payload("")): client.strlen(key) for key in found}


class History:
    """Random journal and sampling calls in any order. Most are valid; the rest must change nothing."""

    def __init__(self, seed: int, client: redis.Redis, oplog: RedisOpLog, payloads: RedisPayloads) -> None:
        self.random = random.Random(seed)
        self.client, self.oplog, self.payloads = client, oplog, payloads
        self.lifecycle = RedisLifecycle(client, SETTINGS)
        self.samples: list[str] = []
        self.steps = [
            self.admit, self.admit, self.admit, self.refuse, self.run, self.run, self.snapshot,
            self.sample, self.finish, self.spill, self.payloads.remove_garbage,
        ]  # fmt: skip

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            try:
                self.random.choice(self.steps)()
            except (BadRequest, Unavailable, Fenced):
                continue

    def admit(self) -> None:
        kind = self.random.choice(["forward_backward", "forward", "optim_step", "save_weights"])
        admit(self.oplog, self.random.randint(0, 60), self.size(), kind)

    def refuse(self) -> None:
        self.oplog.refuse(MODEL, self.random.randint(0, 60), "wrong", "lost_batch")

    def run(self) -> None:
        lease = own(self.oplog)
        if self.oplog.next(lease, lease.applied + 1):
            self.oplog.commit(lease, lease.applied + 1, Result(b"{}", failed=self.random.random() < 0.2))

    def snapshot(self) -> None:
        lease = own(self.oplog)
        if self.random.random() < 0.3 and lease.applied >= 0:
            self.oplog.set_snapshot(lease, self.random.randint(0, lease.applied), "s")

    def sample(self) -> None:
        self.samples.append(admit_sample(self.oplog, self.random.randint(0, 99), self.size()))

    def finish(self) -> None:
        if self.samples:
            self.oplog.finish_sample(self.random.choice(self.samples), OK)

    def spill(self) -> None:
        waiting = sorted(held(self.client))
        if waiting:
            self.payloads.spill(self.random.choice(waiting))

    def size(self) -> int:
        return self.random.choice([1, 100, 5 * KB, 70 * KB, 120 * KB])

    def drain(self) -> None:
        self.lifecycle.end_model(MODEL)
        self.lifecycle.end_calls()
        for request_id in self.samples:
            self.oplog.finish_sample(request_id, OK)
        self.payloads.remove_garbage()


@pytest.mark.parametrize("seed", range(8))
def test_after_any_history_the_counter_is_the_sum_of_what_is_held_and_nothing_is_left_behind(
    seed: int, client: redis.Redis, oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore
):
    history = History(seed, client, oplog, payloads)
    for _ in range(10):
        history.run_steps(40)
        there = held(client)
        assert counted(client) == sum(there.values())
        worth = {request_id.encode() for request_id, size in there.items() if size >= 4 * KB}
        assert set(client.zrange("tinsmith:spillable", 0, -1)) == worth
    history.drain()
    left = (counted(client), held(client), client.keys("*spill*"), client.keys("*staged*"), store.list("payloads"))
    assert left == (0, {}, [], [], [])


def test_over_the_budget_new_work_is_put_off_and_repeats_are_answered(oplog: RedisOpLog, client: redis.Redis):
    for seq in range(4):
        admit(oplog, seq, 95 * KB)
    with pytest.raises(Unavailable, match=r"engine\.payload_budget_bytes; try again soon"):
        admit(oplog, 4, 95 * KB)
    with pytest.raises(Unavailable):
        admit_sample(oplog, 0, 95 * KB)
    assert oplog.entry(MODEL, 4) is None, "nothing is consumed"
    assert client.keys("*staged*") == []
    assert admit(oplog, 3, 95 * KB) == f"{MODEL}:3"
    with pytest.raises(BadRequest, match="other content"):
        oplog.admit(MODEL, 3, "forward_backward", b"x", "another digest")
    assert admit(oplog, 4, 1 * KB), "a small one still fits"
    lease = own(oplog)
    for seq in range(2):
        oplog.commit(lease, seq, OK)
    oplog.set_snapshot(lease, 1, "s")
    assert admit(oplog, 5, 95 * KB), "what was put off comes in under the same seq once there is room"


def test_what_could_never_fit_is_refused_as_such(oplog: RedisOpLog):
    with pytest.raises(TooLarge, match=r"409601 bytes, over engine\.payload_budget_bytes"):
        admit(oplog, 0, 400 * KB + 1)
    with pytest.raises(TooLarge):
        admit_sample(oplog, 0, 400 * KB + 1)
    assert admit(oplog, 0, 400 * KB)


def test_the_op_others_wait_for_is_admitted_over_the_budget(oplog: RedisOpLog):
    """If refused, it would keep the calls after it from ever making room."""
    for seq in (1, 2, 3, 4):
        admit(oplog, seq, 98 * KB)
    with pytest.raises(Unavailable):
        admit(oplog, 5, 98 * KB)
    assert admit(oplog, 0, 98 * KB) == f"{MODEL}:0"


def test_a_large_payload_goes_at_once_and_comes_back_whole(
    oplog: RedisOpLog, payloads: RedisPayloads, client: redis.Redis
):
    admit(oplog, 0, 99 * KB)
    admit(oplog, 1, 101 * KB)
    large = admit_sample(oplog, 2, 102 * KB)
    due = payloads.due(10)
    assert set(due) == {f"{MODEL}:1", large}
    assert all(payloads.spill(request_id) for request_id in due)
    assert counted(client) == 99 * KB
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    assert oplog.next(lease, 1).payload == oplog.entry(MODEL, 1).payload == content(1, 101 * KB)
    assert oplog.claim_sample(large, "a/1").payload == content(2, 102 * KB)
    assert payloads.due(10) == []


def test_the_oldest_go_once_over_half_the_budget_is_used(oplog: RedisOpLog, payloads: RedisPayloads):
    for seq in range(4):
        admit(oplog, seq, 50 * KB)
    assert payloads.due(10) == []
    for seq in range(4, 6):
        admit(oplog, seq, 50 * KB)
    assert payloads.due(10) == [f"{MODEL}:0", f"{MODEL}:1"]
    assert payloads.due(1) == [f"{MODEL}:0"]


def test_a_dropped_payloads_object_is_deleted(oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore):
    lease = own(oplog)
    admit(oplog, 0, 50 * KB)
    admit(oplog, 1, 50 * KB, "forward")
    sample = admit_sample(oplog, 0, 50 * KB)
    for request_id in (f"{MODEL}:0", f"{MODEL}:1", sample):
        assert payloads.spill(request_id)
    assert len(store.list("payloads")) == 3
    for seq in range(2):
        oplog.commit(lease, seq, OK)
    oplog.finish_sample(sample, OK)
    assert payloads.remove_garbage() == 2
    assert len(store.list(f"payloads/{MODEL}:0")) == 1, "a replay still needs it"
    oplog.set_snapshot(lease, 0, "s")
    assert payloads.remove_garbage() == 1
    assert store.list("payloads") == []


def test_while_the_store_is_away_nothing_moves_and_only_spilled_ops_wait(
    oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore, client: redis.Redis, impatient: None
):
    admit(oplog, 0, 50 * KB)
    admit(oplog, 1, 50 * KB)
    sample = admit_sample(oplog, 0, 50 * KB)
    assert payloads.spill(f"{MODEL}:1")
    assert payloads.spill(sample)
    store.away = True
    with pytest.raises(Unavailable):
        payloads.spill(f"{MODEL}:0")
    lease = own(oplog)
    assert oplog.next(lease, 0).payload == content(0, 50 * KB)
    oplog.commit(lease, 0, OK)
    for call in (
        lambda: oplog.next(lease, 1),
        lambda: oplog.entry(MODEL, 1),
        lambda: oplog.claim_sample(sample, "w/1"),
    ):
        with pytest.raises(Unavailable):
            call()
    assert client.hget(keys.op(f"{MODEL}:1"), "runner") is None, "it was not begun"
    assert not client.exists(keys.lease(sample))
    store.away = False
    assert oplog.next(lease, 1).payload == content(1, 50 * KB)
    assert oplog.claim_sample(sample, "w/1").attempts == 0
    assert payloads.remove_garbage() == 1, "the name of the try that failed"


@pytest.mark.parametrize(("size", "calls"), [(0, [1, 0]), (64 * KB, [1, 0]), (64 * KB + 1, [2, 1])])
def test_a_small_content_comes_with_the_start_and_a_large_one_before_it(
    oplog: RedisOpLog, client: redis.Redis, size: int, calls: list[int]
):
    """In one round trip, for a training call and for a sample."""
    admit(oplog, 0, size)
    sample, lease = admit_sample(oplog, 0, size), own(oplog)
    for start in (lambda: oplog.next(lease, 0), lambda: oplog.claim_sample(sample, "w/1")):
        client.config_resetstat()
        assert start().payload == content(0, size)
        said = client.info("commandstats")
        assert [said.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "getrange")] == calls


def test_an_op_dropped_while_its_payload_is_written_leaves_no_object(
    oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore
):
    request_id = admit_sample(oplog, 0, 50 * KB)
    store.before_put = lambda: oplog.finish_sample(request_id, OK)
    assert not payloads.spill(request_id)
    assert len(store.list("payloads")) == 1
    assert payloads.remove_garbage() == 1
    assert store.list("payloads") == []


def test_another_content_under_the_same_id_is_never_swapped(
    oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore, client: redis.Redis
):
    """A sampling id may be used again once its result has expired."""
    request_id = admit_sample(oplog, 0, 50 * KB)

    def again() -> None:
        oplog.finish_sample(request_id, OK)
        client.delete(keys.future(request_id))
        time.sleep(0.005)  # the millisecond of their admission tells them apart
        admit_sample(oplog, 0, 60 * KB)

    store.before_put = again
    assert not payloads.spill(request_id)
    assert payloads.get(request_id) == content(0, 60 * KB)


def test_a_try_taken_for_dead_is_never_swapped_in(
    oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore, impatient: None
):
    """Its object may have been deleted."""
    request_id = admit(oplog, 0, 50 * KB)
    store.before_put = payloads.remove_garbage
    assert not payloads.spill(request_id)
    assert payloads.get(request_id) == content(0, 50 * KB)


def test_of_two_that_spill_one_payload_the_first_counts_and_the_others_object_goes(
    oplog: RedisOpLog, payloads: RedisPayloads, store: AwayStore
):
    request_id = admit(oplog, 0, 50 * KB)

    def the_other() -> None:
        store.before_put = lambda: None
        assert payloads.spill(request_id)
        assert payloads.remove_garbage() == 0, "neither is garbage yet"

    store.before_put = the_other
    assert not payloads.spill(request_id)
    assert payloads.remove_garbage() == 1
    assert payloads.get(request_id) == content(0, 50 * KB)


def test_readers_find_a_payload_at_every_moment_of_its_move(
    oplog: RedisOpLog, payloads: RedisPayloads, store: ObjectStore
):
    lease = own(oplog)
    for seq in range(40):
        admit(oplog, seq, 5 * KB)
    begun, moved = threading.Barrier(3), threading.Event()

    def read() -> None:
        begun.wait(60)
        while not moved.is_set():
            for seq in range(40):
                assert oplog.entry(MODEL, seq).payload == content(seq, 5 * KB)
            assert oplog.next(lease, 0).payload == content(0, 5 * KB)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        begun.wait(60)
        try:
            for seq in range(40):
                assert payloads.spill(f"{MODEL}:{seq}")
        finally:
            moved.set()
        for reader in readers:
            reader.result()


def test_a_repeated_large_call_leaves_no_staged_copy(oplog: RedisOpLog, client: redis.Redis):
    for _ in range(3):
        admit(oplog, 0, 70 * KB)
    assert client.keys("*staged*") == []
    assert counted(client) == 70 * KB

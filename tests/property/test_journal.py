"""The journal on a real server behaves like its model, for any calls in any order."""

from __future__ import annotations

from typing import get_args

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app import ids
from app.domain.records import Model
from app.domain.results import Result
from app.errors import BadRequest, Fenced
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import dump
from app.stores.redis.types import Lease, OwnedElsewhere, RefusalKind
from tests.property.journal_model import JournalModel
from tests.property.runs import run_machine

MODEL = "session:train:0"
QUEUE = "train.base"
WORKERS = st.sampled_from(["a/1", "a/2", "b/1", "b/2"])
KINDS = st.sampled_from(["forward_backward", "optim_step", "forward", "save_weights", "load_weights"])
# Near the next seq, where most transitions happen.
OFFSETS = st.integers(0, 4)
RESULTS = st.builds(Result, st.sampled_from([b"one", b"two"]), failed=st.booleans())


class JournalMachine(RuleBasedStateMachine):
    client: redis.Redis

    @initialize()
    def start(self) -> None:
        self.client.flushall()
        self.oplog = RedisOpLog(self.client, EngineSettings(lease_s=600))
        self.oplog.create_model(MODEL, dump(Model("me", "session", "base", 0.0)))
        self.model = JournalModel()
        self.leases: list[Lease] = []
        self.seen: dict[int, Result] = {}

    @rule(offset=OFFSETS, kind=KINDS, content=st.sampled_from(["x", "y"]))
    def admit_ahead(self, offset: int, kind: str, content: str) -> None:
        self._admit(self.model.applied + 1 + offset, kind, content)

    @precondition(lambda self: self.model.applied >= 0)
    @rule(back=OFFSETS, kind=KINDS, content=st.sampled_from(["x", "y"]))
    def admit_behind(self, back: int, kind: str, content: str) -> None:
        self._admit(max(0, self.model.applied - back), kind, content)

    @precondition(lambda self: self.model.digests)
    @rule(pick=st.integers(0, 99), data=st.data())
    def admit_again(self, pick: int, data: st.DataObject) -> None:
        seq = sorted(self.model.digests)[pick % len(self.model.digests)]
        kind, _, content = self.model.digests[seq].partition(" ")
        assert self._admit(seq, kind, content) == "repeat"

    @rule(offset=st.integers(-2, 4), kind=st.sampled_from(get_args(RefusalKind)))
    def refuse(self, offset: int, kind: RefusalKind) -> None:
        """Refuses a call; a gap is given up in the same way."""
        seq = max(0, self.model.applied + 1 + offset)
        reason = f"{kind} {seq}"
        assert self.oplog.refuse(MODEL, seq, reason, kind) == self.model.refuse(seq, reason, kind)

    @rule(worker=WORKERS)
    def acquire(self, worker: str) -> None:
        held_by = self.model.holder
        found = self.oplog.acquire(MODEL, worker)
        if not self.model.acquire(worker):
            assert found == OwnedElsewhere(held_by.rpartition("/")[0])
            return
        assert isinstance(found, Lease)
        head = (self.model.epoch, self.model.applied, self.model.snapshot, self.model.snapshot_seq)
        assert (found.epoch, found.applied, found.snapshot, found.snapshot_seq) == head
        self.leases.append(found)

    @rule(worker=WORKERS)
    def renew(self, worker: str) -> None:
        assert self.oplog.renew([MODEL], worker) == ([] if self.model.holder == worker else [MODEL])
        self.model.renewed.add(worker)

    @rule(worker=WORKERS)
    def fall_silent(self, worker: str) -> None:
        self.client.delete(keys.lease(worker))
        self.model.renewed.discard(worker)

    @rule(worker=WORKERS)
    def release(self, worker: str) -> None:
        self.oplog.release(MODEL, worker)
        if self.model.holder == worker:
            self.model.holder = ""

    @rule()
    def lapse(self) -> None:
        self.client.delete(keys.lease(MODEL))
        self.model.holder = ""

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 3), offset=st.integers(-1, 2))
    def next(self, which: int, offset: int) -> None:
        lease, seq = self._lease(which), max(0, self.model.applied + 1 + offset)
        if lease.epoch != self.model.epoch:
            with pytest.raises(Fenced):
                self.oplog.next(lease, seq)
            return
        op = self.model.ops.get(seq)
        entry = self.oplog.next(lease, seq)
        if op is None:
            assert entry is None
            return
        assert entry is not None
        assert (entry.kind, entry.payload, entry.doomed) == (op.kind, op.payload, op.doomed)
        assert entry.in_doubt == self.model.begin(seq, lease.worker)
        assert entry.attempts == op.attempts, "each worker that is missed with it counts, and nothing else"

    @precondition(lambda self: self.leases and self.model.ops)
    @rule(which=st.integers(0, 3), pick=OFFSETS, strike=st.booleans())
    def leave(self, which: int, pick: int, strike: bool) -> None:
        """An Op of a live worker stops running: it broke something, or is requeued."""
        lease, seq = self._lease(which), sorted(self.model.ops)[pick % len(self.model.ops)]
        (self.oplog.strike if strike else self.oplog.put_off)(lease, seq)
        self.model.leave(seq, lease.worker, lease.epoch, strike)

    @precondition(lambda self: self.leases and self.model.applied + 1 in self.model.ops)
    @rule(which=st.integers(0, 3), result=RESULTS)
    def commit_next(self, which: int, result: Result) -> None:
        self._commit(self._lease(which), self.model.applied + 1, result)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 3), offset=st.sampled_from([-2, -1, 1, 2]), result=RESULTS)
    def commit_out_of_turn(self, which: int, offset: int, result: Result) -> None:
        self._commit(self._lease(which), self.model.applied + 1 + offset, result, in_turn=False)

    @precondition(lambda self: self.leases and self.model.applied + 1 in self.model.ops)
    @rule(first=RESULTS, second=RESULTS)
    def commit_and_again_as_the_answer_was_lost(self, first: Result, second: Result) -> None:
        lease, seq = self.leases[-1], self.model.applied + 1
        self._commit(lease, seq, first)
        if self.model.applied == seq:
            with pytest.raises(Fenced):
                self.oplog.commit(lease, seq, second)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 3), back=st.integers(-1, 3))
    def set_snapshot(self, which: int, back: int) -> None:
        lease, seq = self._lease(which), self.model.applied - back
        reference = f"snapshot {seq} of {lease.epoch}"
        replaced = self.model.set_snapshot(lease.epoch, seq, reference)
        if replaced is not None:
            assert self.oplog.set_snapshot(lease, seq, reference) == replaced
        else:
            with pytest.raises(Fenced):
                self.oplog.set_snapshot(lease, seq, reference)

    @precondition(lambda self: self.model.results)
    @rule(pick=st.integers(0, 99))
    def read(self, pick: int) -> None:
        seq = sorted(self.model.results)[pick % len(self.model.results)]
        future = self.oplog.future(ids.request_id(MODEL, seq), {"me"})
        assert future.result == self.seen.setdefault(seq, self.model.results[seq]), "a result changed"

    @precondition(lambda self: self.model.results)
    @rule(pick=st.integers(0, 99))
    def a_result_expires(self, pick: int) -> None:
        seq = sorted(self.model.results)[pick % len(self.model.results)]
        self.client.delete(keys.future(ids.request_id(MODEL, seq)))
        for gone in (self.model.results, self.model.digests, self.seen):
            gone.pop(seq, None)

    @invariant()
    def the_journal_is_what_the_model_says(self) -> None:
        """Checks all seqs from just after the snapshot to just beyond the last."""
        model = self.model
        for seq in range(max(0, model.snapshot_seq), max([*model.ops, model.applied, 0]) + 2):
            entry, op = self.oplog.entry(MODEL, seq), model.ops.get(seq)
            assert (entry is None) == (op is None), f"seq {seq} is in the journal of one only"
            if entry is not None and op is not None:
                found = (entry.kind, entry.payload, entry.doomed, entry.attempts)
                assert found == (op.kind, op.payload, op.doomed, op.attempts)

    @invariant()
    def the_last_applied_has_its_result_and_the_next_has_none(self) -> None:
        for seq in (self.model.applied, self.model.applied + 1):
            assert self.oplog.outcome(ids.request_id(MODEL, seq)) == self.model.results.get(seq)

    def teardown(self) -> None:
        for seq, result in self.model.results.items() if hasattr(self, "model") else ():
            assert self.oplog.outcome(ids.request_id(MODEL, seq)) == result, f"the result of seq {seq} changed"

    @invariant()
    def what_may_still_run_is_whole_and_nothing_else_is_kept(self) -> None:
        kept = {int(key.rpartition(b":")[2]) for key in self.client.keys(keys.payload("*"))}
        assert kept == {seq for seq, op in self.model.ops.items() if op.payload}

    @invariant()
    def whoever_asks_next_finds_the_newest_head(self) -> None:
        found = self.client.hmget(keys.model(MODEL), ["applied", "epoch", "snapshot", "snapshot_seq"])
        model = self.model
        assert [x.decode() for x in found] == [
            str(x) for x in (model.applied, model.epoch, model.snapshot, model.snapshot_seq)
        ]

    @invariant()
    def nothing_that_waits_is_forgotten(self) -> None:
        rows = self.oplog.pending()
        if max(self.model.ops, default=-1) <= self.model.applied:
            assert rows == []
            return
        (row,) = rows
        kinds, seq = self.model.waiting(), self.model.applied + 1
        assert (row.id, row.queue, row.seq, list(row.kinds)) == (MODEL, QUEUE, seq, kinds)
        assert row.running == bool(self.model.holder and kinds and self.model.ops[seq].runner == self.model.holder)

    def _admit(self, seq: int, kind: str, content: str) -> str:
        payload, digest = f"{kind} {content} {seq}".encode(), f"{kind} {content}"
        expected = self.model.admit(seq, kind, payload, digest)
        if expected in ("fresh", "repeat"):
            found = self.oplog.admit(MODEL, seq, kind, payload, digest)
            assert (found.request_id, found.fresh) == (ids.request_id(MODEL, seq), expected == "fresh")
            assert found.node == (self.model.holder.rpartition("/")[0] or None)
        else:
            with pytest.raises(BadRequest):
                self.oplog.admit(MODEL, seq, kind, payload, digest)
        return expected

    def _lease(self, which: int) -> Lease:
        """Picks the newest lease most of the time, else an earlier one."""
        return self.leases[-1 - which % len(self.leases)]

    def _commit(self, lease: Lease, seq: int, result: Result, in_turn: bool = True) -> None:
        why = f"failed {seq}"
        if in_turn and self.model.commit(lease.epoch, seq, result, why):
            self.oplog.commit(lease, seq, result, why=why)
        else:
            with pytest.raises(Fenced):
                self.oplog.commit(lease, seq, result, why=why)


@pytest.fixture
def machine(client: redis.Redis) -> JournalMachine:
    """A machine to run by hand, as the output of a failing run shows."""
    machine = type("Journal", (JournalMachine,), {"client": client})()
    machine.start()
    return machine


def check(machine: JournalMachine) -> None:
    machine.the_journal_is_what_the_model_says()
    machine.what_may_still_run_is_whole_and_nothing_else_is_kept()
    machine.nothing_that_waits_is_forgotten()


def test_a_seq_that_is_taken_can_not_be_refused(machine: JournalMachine):
    machine.admit_ahead(1, "forward_backward", "x")
    machine.refuse(1, "lost_batch")
    check(machine)


def test_the_first_reason_an_op_fails_for_stays(machine: JournalMachine):
    machine.admit_ahead(2, "forward_backward", "x")
    for lost in (1, 0):
        machine.refuse(lost, "lost_batch")
        check(machine)


def test_the_ops_behind_an_op_fail_for_its_first_reason(machine: JournalMachine):
    machine.admit_ahead(1, "forward_backward", "x")
    machine.refuse(0, "lost_batch")
    machine.admit_ahead(2, "save_weights", "x")
    machine.acquire("a/1")
    machine.commit_next(0, Result(b"lost", failed=True))
    machine.commit_next(0, Result(b"one", failed=True))
    check(machine)


def test_what_is_behind_a_snapshot_is_trimmed_and_the_rest_stays(machine: JournalMachine):
    for seq in range(3):
        machine.admit_ahead(seq, "forward_backward", "x")
    machine.acquire("a/1")
    for _ in range(2):
        machine.commit_next(0, Result(b"one"))
        machine.set_snapshot(0, 0)
        check(machine)


def test_what_a_replay_runs_is_kept_until_then(machine: JournalMachine):
    machine.acquire("a/1")
    for kind in ("forward_backward", "optim_step", "load_weights", "forward", "save_weights"):
        machine.admit_ahead(0, kind, "x")
        machine.commit_next(0, Result(b"one"))
        check(machine)


def test_a_journal_does_what_its_model_says(client: redis.Redis):
    run_machine(type("Journal", (JournalMachine,), {"client": client}), short=60)

"""Promises of the journal, on a real server."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from app.domain.records import Model
from app.domain.results import Result
from app.errors import BadRequest, Fenced, NotFound
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import OwnedElsewhere
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, commit_through, own


def test_a_repeated_call_has_the_same_future_and_one_journal_entry(oplog, client):
    first = oplog.admit(MODEL, 0, "create_model", b"x", "d")
    again = oplog.admit(MODEL, 0, "create_model", b"x", "d")
    assert (first.fresh, again.fresh) == (True, False)
    assert first.request_id == again.request_id
    assert client.zcard(keys.journal(MODEL)) == 1


def test_other_content_under_a_used_seq_is_a_400_and_changes_nothing(oplog):
    admit(oplog, 0)
    with pytest.raises(BadRequest, match="seq_id 0 was used before with other content"):
        oplog.admit(MODEL, 0, "forward_backward", b"other", "other digest")
    entry = oplog.entry(MODEL, 0)
    assert entry is not None and entry.payload == b"payload 0"


def test_an_unknown_model_is_not_found_for_admission_and_ownership(oplog):
    with pytest.raises(NotFound):
        oplog.admit("nobody:train:0", 0, "optim_step", b"", "d")
    with pytest.raises(NotFound):
        oplog.acquire("nobody:train:0", "a/1")


def test_whatever_the_order_of_arrival_ops_commit_in_seq_order(oplog):
    order = list(range(20))
    random.Random(7).shuffle(order)
    lease = own(oplog)
    done = -1
    for seq in order:
        admit(oplog, seq)
        while (entry := oplog.next(lease, done + 1)) is not None:
            assert entry.payload == b"payload %d" % (done + 1)
            oplog.commit(lease, done + 1, OK)
            done += 1
    assert done == 19


def test_a_commit_out_of_order_or_twice_is_fenced(oplog):
    admit(oplog, 0)
    admit(oplog, 1)
    lease = own(oplog)
    with pytest.raises(Fenced):
        oplog.commit(lease, 1, OK)
    oplog.commit(lease, 0, OK)
    with pytest.raises(Fenced):
        oplog.commit(lease, 0, Result(b"another"))
    assert oplog.future(f"{MODEL}:0", {"me"}).result == OK


def test_one_node_owns_a_model_until_its_lease_ends(oplog):
    own(oplog, "a/1")
    assert oplog.acquire(MODEL, "b/1") == OwnedElsewhere("a")
    assert oplog.renew([MODEL], "b/1") == [MODEL]
    assert oplog.renew([MODEL], "a/1") == []
    oplog.release(MODEL, "b/1")
    assert oplog.acquire(MODEL, "b/1") == OwnedElsewhere("a")
    oplog.release(MODEL, "a/1")
    assert own(oplog, "b/1").epoch == 2


def test_a_restarted_node_replaces_its_earlier_process_and_fences_it(oplog):
    admit(oplog, 0)
    before, after = own(oplog, "a/1"), own(oplog, "a/2")
    assert after.epoch == before.epoch + 1
    for late in (lambda: oplog.next(before, 0), lambda: oplog.commit(before, 0, OK)):
        with pytest.raises(Fenced):
            late()
    oplog.commit(after, 0, OK)


def test_a_lapsed_lease_can_be_taken_and_its_old_owner_commits_nothing(oplog, client):
    admit(oplog, 0)
    old = own(oplog, "a/1")
    client.delete(keys.lease(MODEL))
    new = own(oplog, "b/1")
    with pytest.raises(Fenced):
        oplog.commit(old, 0, OK)
    oplog.commit(new, 0, OK, [("checkpoints", "tinker://x", {"owner": '"me"'})])


def test_a_commit_records_and_result_appear_together(oplog, client):
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, Result(b"bytes", "application/x-protobuf"), [("models", MODEL, {"state": '"ready"'})])
    stored = RedisRecords(client).get("models", MODEL)
    assert stored is not None and load(Model, stored).state == "ready"
    future = oplog.future(f"{MODEL}:0", {"me"})
    assert future.state == "done"
    assert future.result == Result(b"bytes", "application/x-protobuf")


@pytest.mark.parametrize("refused", ["lost_batch", "forward_backward"])
def test_a_lost_batch_is_consumed_and_dooms_only_what_waited_up_to_the_next_optim_step(oplog, refused):
    for seq, kind in ((0, "create_model"), (2, "forward_backward"), (3, "optim_step"), (4, "forward_backward")):
        admit(oplog, seq, kind)
    assert oplog.refuse(MODEL, 1, "tokens out of range", refused)
    admit(oplog, 5, "optim_step")
    lease = own(oplog)
    entries = [oplog.next(lease, seq) for seq in range(6)]
    assert entries[1].kind == refused
    assert [bool(entry.doomed) for entry in entries] == [False, True, True, True, False, False]
    with pytest.raises(BadRequest, match="seq_id 1 was refused: tokens out of range"):
        admit(oplog, 1)


@pytest.mark.parametrize("refused", ["lost_batch", "forward_backward"])
def test_calls_made_after_a_refusal_are_not_doomed_when_its_turn_comes(oplog, refused):
    admit(oplog, 0, "create_model")
    assert oplog.refuse(MODEL, 1, "tokens out of range", refused)
    for seq, kind in ((2, "save_weights"), (3, "forward")):
        admit(oplog, seq, kind)
    lease = own(oplog)
    for seq in (0, 1):
        oplog.commit(lease, seq, Result(b"{}", failed=seq == 1), why="tokens out of range")
    assert [oplog.entry(MODEL, seq).doomed for seq in (2, 3)] == ["", ""]


def test_a_refused_call_without_a_gradient_dooms_nothing(oplog):
    for seq, kind in ((0, "create_model"), (2, "forward_backward"), (3, "optim_step")):
        admit(oplog, seq, kind)
    assert oplog.refuse(MODEL, 1, "no such name")
    assert [oplog.entry(MODEL, seq).doomed for seq in (2, 3)] == ["", ""]


def test_a_failed_forward_backward_dooms_what_waits_up_to_the_next_optim_step(oplog):
    for seq, kind in enumerate(("create_model", "forward_backward", "forward_backward", "optim_step", "optim_step")):
        admit(oplog, seq, kind)
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    oplog.commit(lease, 1, Result(b"{}", failed=True), why="infinite")
    assert [oplog.entry(MODEL, seq).doomed for seq in (1, 2, 3, 4)] == ["infinite", "infinite", "infinite", ""]


def test_a_large_payload_comes_back_whole_and_is_trimmed(oplog, client):
    content = bytes(range(256)) * 4000
    oplog.admit(MODEL, 0, "create_model", content, "d")
    lease = own(oplog)
    assert oplog.next(lease, 0).payload == content
    oplog.commit(lease, 0, OK)
    assert oplog.entry(MODEL, 0).payload == content
    oplog.set_snapshot(lease, 0, "s")
    assert client.keys("*payload:*") == [] == client.keys("*staged*")


def test_a_seq_that_is_journalled_or_applied_cannot_be_refused(oplog):
    admit(oplog, 0)
    admit(oplog, 1)
    assert not oplog.refuse(MODEL, 1, "late")
    lease = own(oplog)
    commit_through(oplog, lease, 1)
    assert not oplog.refuse(MODEL, 0, "late")
    assert oplog.entry(MODEL, 1).doomed == ""


def test_a_given_up_gap_drops_gradients_in_its_place(oplog):
    admit(oplog, 0, "create_model")
    admit(oplog, 2, "optim_step")
    assert oplog.refuse(MODEL, 1, "seq 1 never came", "drop_gradients")
    assert oplog.entry(MODEL, 1).kind == "drop_gradients"


def test_a_failed_op_is_never_replayed(oplog):
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, Result(b"{}", failed=True))
    assert oplog.entry(MODEL, 0).doomed
    assert oplog.future(f"{MODEL}:0", {"me"}).state == "failed"


def test_an_attempt_counts_when_another_boot_left_the_op_running(oplog, client):
    admit(oplog, 0)

    def begin(worker: str) -> int:
        client.delete(keys.lease(MODEL))
        return oplog.next(own(oplog, worker), 0).attempts

    boots = ["a/1", "a/1", "a/1", "a/2", "a/2", "b/1", "a/3"]
    assert [begin(worker) for worker in boots] == [0, 0, 0, 1, 1, 2, 3]


def test_a_strike_counts_once_and_what_was_put_off_not_at_all(oplog):
    admit(oplog, 0)
    lease = own(oplog, "a/1")
    oplog.next(lease, 0)
    oplog.strike(lease, 0)
    successor = own(oplog, "a/2")
    assert oplog.next(successor, 0).attempts == 1, "the strike has counted the attempt of the first boot"
    oplog.put_off(successor, 0)
    assert oplog.next(own(oplog, "a/3"), 0).attempts == 1


def begun(oplog, client, *workers):
    """Begins the Op at seq 0 with each owner in turn; returns it as the last one finds it."""
    for worker in workers:
        client.delete(keys.lease(MODEL))
        lease = own(oplog, worker)
        entry = oplog.next(lease, 0)
    return lease, entry


def test_a_worker_that_was_cut_off_had_no_attempt_unless_it_dies_later(oplog, client):
    admit(oplog, 0)
    begun(oplog, client, "a/1")
    oplog.renew([], "a/1")
    assert begun(oplog, client, "b/1")[1].attempts == 0, "it lives, though its lease lapsed"
    client.delete(keys.lease("a/1"))
    assert begun(oplog, client, "c/1")[1].attempts == 2, "both died with it"


def test_a_worker_that_reappears_takes_its_attempt_back(oplog, client):
    admit(oplog, 0)
    _, entry = begun(oplog, client, "a/1", "b/1")
    assert (entry.attempts, entry.in_doubt) == (1, True)
    oplog.renew([], "a/1")
    _, entry = begun(oplog, client, "b/1")
    assert (entry.attempts, entry.in_doubt) == (0, False)


def test_a_worker_that_left_an_op_which_others_took_over_has_no_attempt_even_if_it_dies_later(oplog, client):
    admit(oplog, 0)
    fenced, _ = begun(oplog, client, "a/1")
    begun(oplog, client, "b/1")
    oplog.put_off(fenced, 0)
    assert oplog.entry(MODEL, 0).attempts == 0
    assert begun(oplog, client, "c/1")[1].attempts == 1, "that of b"


def test_a_process_whose_node_has_restarted_is_dead_although_it_renewed_its_leases(oplog, client):
    admit(oplog, 0)
    begun(oplog, client, "a/1")
    oplog.renew([], "a/1")
    _, entry = begun(oplog, client, "a/2")
    assert (entry.attempts, entry.in_doubt) == (1, False)
    assert begun(oplog, client, "b/1")[1].attempts == 2


def test_an_attempt_is_in_doubt_until_its_worker_was_missed_for_a_lease(oplog, client):
    admit(oplog, 0)
    hasty = RedisOpLog(client, EngineSettings(lease_s=0.3))
    assert begun(hasty, client, "a/1", "b/1")[1].in_doubt
    time.sleep(0.31)
    assert not begun(hasty, client, "b/1")[1].in_doubt
    assert begun(hasty, client, "c/1")[1].in_doubt, "b is missed only now"


def test_a_clock_that_was_set_back_prolongs_a_doubt_by_one_lease_only(oplog, client):
    lease_ms = 3_600_000
    admit(oplog, 0)
    log = RedisOpLog(client, EngineSettings(lease_s=lease_ms / 1000))
    begun(log, client, "a/1", "b/1")
    op = keys.op(f"{MODEL}:0")
    for passed_ms, in_doubt in ((-10 * lease_ms, True), (lease_ms, False)):  # the clock was set back at first
        former = json.loads(client.hget(op, "former"))
        former["a/1"] -= passed_ms
        client.hset(op, "former", json.dumps(former))
        entry = begun(log, client, "b/1")[1]
        assert (entry.attempts, entry.in_doubt) == (1, in_doubt)


def test_an_older_owner_strikes_nothing(oplog):
    admit(oplog, 0)
    old, new = own(oplog, "a/1"), own(oplog, "a/2")
    oplog.next(new, 0)
    oplog.strike(old, 0)
    oplog.strike(new, 7)
    assert oplog.next(new, 0).attempts == 0
    assert oplog.entry(MODEL, 7) is None


def test_restores_that_ended_workers_are_forgotten_an_hour_after_the_first_of_them(oplog, client):
    restores = f"tinsmith:restore:{MODEL}"
    oplog.begin_restore(own(oplog, "a/1"))
    assert 3000 < client.ttl(restores) <= 3600
    client.expire(restores, 1000)
    assert oplog.begin_restore(own(oplog, "a/2"))[0] == 1
    assert 400 < client.ttl(restores) <= 1000


def test_a_snapshot_trims_the_journal_behind_it_and_only_moves_forward(oplog, client):
    for seq in range(4):
        admit(oplog, seq)
    lease = own(oplog)
    commit_through(oplog, lease, 2)
    assert oplog.set_snapshot(lease, 1, "s1") == ""
    assert oplog.entry(MODEL, 1) is None
    assert oplog.entry(MODEL, 2) is not None
    for seq in (1, 3):  # not newer, not applied yet
        with pytest.raises(Fenced):
            oplog.set_snapshot(lease, seq, "s")
    assert oplog.set_snapshot(lease, 2, "s2") == "s1"
    assert (own(oplog, "a/2").snapshot, own(oplog, "a/2").snapshot_seq) == ("s2", 2)
    with pytest.raises(Fenced):
        oplog.set_snapshot(lease, 2, "s3")


def test_a_snapshot_set_again_by_its_owner_changes_nothing(oplog):
    for seq in range(2):
        admit(oplog, seq)
    old = own(oplog, "a/1")
    for seq in range(2):
        oplog.commit(old, seq, OK)
    oplog.set_snapshot(old, 0, "s0")
    assert oplog.set_snapshot(old, 1, "s1") == "s0"
    assert oplog.set_snapshot(old, 1, "s1") == "s1"
    own(oplog, "a/2")
    with pytest.raises(Fenced):
        oplog.set_snapshot(old, 1, "s1")


def test_a_repeat_behind_the_snapshot_keeps_its_future(oplog):
    admit(oplog, 0)
    lease = own(oplog)
    commit_through(oplog, lease, 0)
    oplog.set_snapshot(lease, 0, "s")
    assert admit(oplog, 0) == f"{MODEL}:0"


def test_a_seq_whose_future_has_expired_is_not_run_again(oplog, client):
    admit(oplog, 0)
    commit_through(oplog, own(oplog), 0)
    client.delete(keys.future(f"{MODEL}:0"))
    with pytest.raises(BadRequest, match="was used before and cannot"):
        admit(oplog, 0)


def test_a_replaced_owner_sets_no_snapshot(oplog):
    for seq in range(2):
        admit(oplog, seq)
    old = own(oplog, "a/1")
    commit_through(oplog, old, 1)
    own(oplog, "a/2")
    with pytest.raises(Fenced):
        oplog.set_snapshot(old, 1, "late")


def test_heads_show_what_waits_and_whether_a_worker_began_it(oplog):
    admit(oplog, 0)
    assert oplog.heads({MODEL: 1, "nobody:train:0": 0}) == []
    (head,) = oplog.heads({MODEL: 0})
    assert (head.seq, head.kind, head.fresh) == (0, "forward_backward", True)
    lease = own(oplog)
    oplog.next(lease, 0)
    assert not oplog.heads({MODEL: 0})[0].fresh, "it runs"
    oplog.strike(lease, 0)
    assert not oplog.heads({MODEL: 0})[0].fresh, "it broke a worker"


def test_the_head_behind_a_lost_gradient_is_not_fresh(oplog):
    admit(oplog, 0)
    oplog.commit(own(oplog), 0, OK)
    admit(oplog, 2, "forward_backward")
    oplog.refuse(MODEL, 1, "never came", "drop_gradients")
    assert not oplog.heads({MODEL: 2})[0].fresh


def test_a_head_and_the_next_entry_name_their_owner(oplog, client):
    admit(oplog, 0)
    assert oplog.heads({MODEL: 0})[0].owner == "me"
    client.hset(keys.model(MODEL), "owner", '"another"')
    entry = oplog.next(own(oplog), 0)
    assert entry is not None and entry.owner == "another"
    assert oplog.heads({MODEL: 0})[0].owner == "another"


def test_unowned_are_the_models_of_a_queue_that_wait_and_have_no_live_owner(oplog, client):
    assert oplog.unowned("train.base") == []
    admit(oplog, 0)
    assert oplog.unowned("train.other") == []
    assert oplog.unowned("train.base") == oplog.heads({MODEL: 0})
    lease = own(oplog)
    assert oplog.unowned("train.base") == []
    client.delete(keys.lease(MODEL))
    assert len(oplog.unowned("train.base")) == 1, "its owner has died"
    oplog.commit(lease, 0, OK)
    assert oplog.unowned("train.base") == []
    admit(oplog, 2)
    assert oplog.unowned("train.base") == [], "a gap is before it"


def test_pending_shows_gaps_and_what_runs(oplog):
    assert oplog.pending() == []
    admit(oplog, 1)
    (gap,) = oplog.pending()
    assert (gap.id, gap.queue, gap.seq, gap.kinds, gap.running) == (MODEL, "train.base", 0, (), False)
    admit(oplog, 0)
    lease = own(oplog)
    oplog.next(lease, 0)
    (busy,) = oplog.pending()
    assert (busy.kinds, busy.running) == (("forward_backward", "forward_backward"), True)
    commit_through(oplog, lease, 1)
    assert oplog.pending() == []


def test_a_call_that_cannot_be_read_is_counted_and_hides_no_other(oplog, client):
    admit(oplog, 0)
    client.set(keys.model("s:train:broken"), "no hash")
    client.zadd(keys.PENDING, {"s:train:broken": 0})
    assert [one.id for one in oplog.pending()] == [MODEL]
    assert oplog.count_pending() == 2


def test_concurrent_admissions_of_one_op_agree(oplog):
    seen: list[bool] = []
    threads = [
        threading.Thread(target=lambda: seen.append(oplog.admit(MODEL, 0, "k", b"p", "d").fresh)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [False] * 15 + [True]

"""Results: their readers and their lifetimes. The first result of a sample stays."""

from __future__ import annotations

import contextlib

import pytest

from app.domain.records import Sampler
from app.domain.results import Result
from app.errors import BadRequest, Fenced, Gone, NotFound, TriedOften
from app.stores.redis import keys
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords, dump
from tests.unit.app.stores.redis.journal_steps import MODEL, OK, admit, own


def test_foreign_and_unknown_futures_look_alike_and_an_expired_one_is_gone(oplog, client):
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    for request_id, owner in ((f"{MODEL}:0", "you"), ("nobody:train:0:0", "me"), (f"{MODEL}:7", "me"), ("x", "me")):
        with pytest.raises(NotFound, match=r"future .* does not exist"):
            oplog.future(request_id, {owner})
    client.delete(keys.future(f"{MODEL}:0"))
    with pytest.raises(Gone):
        oplog.future(f"{MODEL}:0", {"me"})
    with pytest.raises(NotFound):
        oplog.future(f"{MODEL}:0", {"you"})


def test_of_a_result_only_its_owner_learns_the_size(oplog, client):
    """Not even by the time that the answer takes, so it is counted in the bytes that the state server sends."""
    admit(oplog, 0)
    admit(oplog, 1)
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    oplog.commit(lease, 1, Result(b"x" * 500_000))

    def sent(seq: int, project: str) -> int:
        before = client.info("stats")["total_net_output_bytes"]
        with contextlib.suppress(NotFound):
            oplog.future(f"{MODEL}:{seq}", {project})
        return client.info("stats")["total_net_output_bytes"] - before

    assert sent(1, "me") > 500_000
    foreign = [sent(seq, "you") for seq in (0, 1, 7)]
    assert max(foreign) - min(foreign) < 100, "one is unknown, and the counts of INFO get longer"


def test_a_result_lives_shorter_once_read(oplog, client):
    admit(oplog, 0)
    lease = own(oplog)
    oplog.commit(lease, 0, OK)
    assert client.ttl(keys.future(f"{MODEL}:0")) > 3600
    oplog.future(f"{MODEL}:0", {"me"})
    assert 3000 < client.ttl(keys.future(f"{MODEL}:0")) <= 3600


@pytest.mark.parametrize(("size", "seconds"), [(0, 3600), (64 * 1024, 3600), (256 * 1024, 900), (4 * 2**20, 300)])
def test_the_larger_a_read_result_the_shorter_it_lives(oplog, client, size, seconds):
    admit(oplog, 0)
    oplog.commit(own(oplog), 0, Result(bytes(size)))
    oplog.future(f"{MODEL}:0", {"me"})
    assert 0.8 * seconds < client.ttl(keys.future(f"{MODEL}:0")) <= seconds


def test_a_result_that_is_read_again_lives_no_longer(oplog, client):
    admit(oplog, 0)
    oplog.commit(own(oplog), 0, OK)
    oplog.future(f"{MODEL}:0", {"me"})
    client.expire(keys.future(f"{MODEL}:0"), 60)
    oplog.future(f"{MODEL}:0", {"me"})
    assert client.ttl(keys.future(f"{MODEL}:0")) <= 60


def sample(oplog: RedisOpLog, digest: str = "d") -> bool:
    return oplog.admit_sample("s:sample:0:5", "s:sample:0", "me", "sample.base", b"ask", digest).fresh


def test_a_sample_is_deduplicated_claimed_once_and_its_first_result_stays(oplog):
    assert [sample(oplog), sample(oplog)] == [True, False]
    with pytest.raises(BadRequest):
        sample(oplog, "other")
    entry = oplog.claim_sample("s:sample:0:5", "a/1")
    assert entry is not None and entry.payload == b"ask"
    with pytest.raises(Fenced):
        oplog.claim_sample("s:sample:0:5", "b/1")
    assert [oplog.finish_sample("s:sample:0:5", Result(body)) for body in (b"one", b"two")] == [True, False]
    assert oplog.future("s:sample:0:5", {"me"}).result == Result(b"one")
    assert oplog.claim_sample("s:sample:0:5", "b/1") is None
    assert oplog.pending() == []


def test_a_sample_that_was_put_off_had_no_attempt_and_is_free_for_anybody(oplog):
    sample(oplog)
    attempts = []
    for boot in range(5):
        attempts.append(oplog.claim_sample("s:sample:0:5", f"a/{boot}").attempts)
        oplog.put_off_sample("s:sample:0:5", f"a/{boot}")
    assert attempts == [0, 0, 0, 0, 0]


def test_a_sample_tried_too_often_is_not_begun_and_has_no_further_attempt_by_that(oplog, client):
    sample(oplog)
    for boot in range(2):
        oplog.claim_sample("s:sample:0:5", f"a/{boot}", 1)
        client.delete(keys.lease("s:sample:0:5"))
    for boot in range(3):
        with pytest.raises(TriedOften):
            oplog.claim_sample("s:sample:0:5", f"b/{boot}", 1)
    assert oplog.claim_sample("s:sample:0:5", "b/3").attempts == 2


def test_a_sampler_that_was_cut_off_had_no_attempt(oplog, client):
    sample(oplog)
    oplog.claim_sample("s:sample:0:5", "a/1")
    client.delete(keys.lease("s:sample:0:5"))
    oplog.renew([], "a/1")
    assert oplog.claim_sample("s:sample:0:5", "b/1").attempts == 0
    oplog.put_off_sample("s:sample:0:5", "a/1")
    client.delete(keys.lease("s:sample:0:5"), keys.lease("a/1"))
    assert oplog.claim_sample("s:sample:0:5", "c/1").attempts == 1, "that of b"


def test_a_worker_that_lost_its_sample_puts_nothing_off(oplog, client):
    sample(oplog)
    oplog.claim_sample("s:sample:0:5", "a/1")
    client.delete(keys.lease("s:sample:0:5"))
    oplog.claim_sample("s:sample:0:5", "b/1")
    oplog.put_off_sample("s:sample:0:5", "a/1")
    with pytest.raises(Fenced):
        oplog.claim_sample("s:sample:0:5", "a/1")


def test_a_lost_sample_is_gone_so_that_the_sdk_samples_again(oplog, client):
    RedisRecords(client).put("samplers", "s:sample:0", dump(Sampler("me", "s", "base", 0.0)))
    with pytest.raises(Gone):
        oplog.future("s:sample:0:9", {"me"})

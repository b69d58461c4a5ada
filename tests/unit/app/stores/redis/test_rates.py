"""Limits on rates: buckets of calls and tokens, on a real server. Nothing is charged twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from app.domain.limits import KEY, PROJECT, Charge, Limits, Payer, Used
from app.domain.results import Result
from app.errors import TooManyRequests
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Lease
from tests.unit.app.stores.redis.charges import MODEL, ask, mine, oplog, quotas, stored

__all__ = ["oplog", "quotas", "stored"]  # the fixtures


# A call takes 4.9 of the 10 seconds a bucket holds: 3 pass at once, the next in 4.7 s.
SLOW = Limits(requests_per_s=1 / 4.9)


def at_once(test: Callable[..., None]) -> Callable[..., None]:
    """Repeats a failed test from the same state if the server's clock had advanced by a second or more.

    A machine that stands still fills buckets.
    """

    @functools.wraps(test)
    def run(client: redis.Redis, **fixtures: object) -> None:
        state = {key: client.dump(key) for key in client.scan_iter()}
        while True:
            began = RedisRecords(client).now()
            try:
                return test(client=client, **fixtures)
            except (AssertionError, pytest.fail.Exception, TooManyRequests):
                if RedisRecords(client).now() - began < 1:
                    raise
            client.flushall()
            for key, value in state.items():
                client.restore(key, 0, value)

    return run


def later(client: redis.Redis, payer: Payer, seconds: float) -> None:
    """Simulates the passage of so much time."""
    for name in client.hkeys(f"tinsmith:rates:{payer.name}"):
        if name.endswith(b"_at"):
            client.hincrby(f"tinsmith:rates:{payer.name}", name, -int(1000 * seconds))


def passed(quotas: RedisQuotas, charge: Charge, most: int = 50) -> int:
    """Number of calls that pass at once, one after another."""
    for count in range(most):
        try:
            quotas.take(charge)
        except TooManyRequests:
            return count
    return most


@at_once
def test_calls_pass_until_the_bucket_is_empty_and_at_the_rate_from_then_on(client, quotas):
    charge = Charge(mine(SLOW))
    assert passed(quotas, charge) == 3
    with pytest.raises(TooManyRequests, match=r"project me made \S+ calls .* requests_per_s is 0\.20") as caught:
        quotas.take(charge)
    assert caught.value.retry_after_s in range(1, 6)
    later(client, charge.payers[0], 300)
    assert passed(quotas, charge) == 3, "what was not used for long is not saved up"
    for _ in range(20):
        later(client, charge.payers[0], 4.9)
        assert passed(quotas, charge) == 1


@at_once
def test_a_call_larger_than_the_bucket_passes_and_the_debt_is_waited_for(client, quotas):
    payers = mine(Limits(tokens_per_s=100))
    quotas.take(Charge(payers, tokens=5000))
    with pytest.raises(TooManyRequests, match="tokens_per_s is 100") as caught:
        quotas.take(Charge(payers, tokens=1))
    assert caught.value.retry_after_s in range(30, 41)
    quotas.take(Charge(payers))  # a call without tokens waits for none
    later(client, payers[0], 41)
    quotas.take(Charge(payers, tokens=1))


@at_once
def test_a_new_limit_holds_at_once_for_what_was_taken_under_the_old_one(client, quotas):
    quotas.take(Charge(mine(Limits(tokens_per_s=1)), tokens=1000))
    with pytest.raises(TooManyRequests, match=r"in 9[89]\d s"):
        quotas.take(Charge(mine(Limits(tokens_per_s=1)), tokens=1))
    with pytest.raises(TooManyRequests, match=r"in (\d|10) s"):
        quotas.take(Charge(mine(Limits(tokens_per_s=50)), tokens=1))
    quotas.take(Charge(mine(Limits(tokens_per_s=500)), tokens=1))


@at_once
def test_the_state_of_a_rate_goes_when_it_has_filled_up(client, quotas):
    payers = mine(SLOW)
    quotas.take(Charge(payers))
    assert 4000 < client.pttl(f"tinsmith:rates:{payers[0].name}") <= 7000


@pytest.mark.parametrize("most", [1, 50])
def test_a_clock_that_was_set_back_refuses_no_call(client, quotas, most):
    """Whether the bucket had something left or was empty."""
    charge = Charge(mine(SLOW))
    passed(quotas, charge, most)
    later(client, charge.payers[0], -3600)
    assert passed(quotas, charge) >= 3


@at_once
def test_a_refused_call_is_charged_to_nobody(client, quotas):
    payers = mine(SLOW, Limits(requests_per_s=0.01))
    assert passed(quotas, Charge(payers)) == 1, "the key lets one in"
    with pytest.raises(TooManyRequests, match="key k made"):
        quotas.take(Charge(payers))
    assert passed(quotas, Charge(mine(SLOW))) == 2, "of the project's 3"


@at_once
def test_each_project_and_each_key_has_a_bucket_of_its_own(client, quotas):
    assert passed(quotas, Charge(mine(SLOW))) == 3
    assert passed(quotas, Charge((Payer(PROJECT, "other", SLOW), Payer(KEY, "me", SLOW)))) == 3


@at_once
def test_a_repeat_of_what_was_admitted_is_never_refused_and_counts_once(client, oplog, quotas):
    charge = Charge(mine(SLOW))
    assert ask(oplog, 0, charge, "create_model")
    for _ in range(9):
        assert not ask(oplog, 0, charge, "create_model")
    assert passed(quotas, charge) == 2
    assert not ask(oplog, 0, charge, "create_model")


@at_once
def test_a_call_that_is_refused_leaves_its_seq_free(client, oplog, quotas):
    charge = Charge(mine(SLOW))
    passed(quotas, charge)
    with pytest.raises(TooManyRequests):
        ask(oplog, 1, charge)
    assert oplog.entry(MODEL, 1) is None
    later(client, charge.payers[0], 10)
    assert ask(oplog, 1, charge)


@at_once
def test_what_others_wait_for_passes_and_is_charged(client, oplog, quotas):
    charge = Charge(mine(SLOW))
    assert ask(oplog, 1, charge)
    passed(quotas, charge)
    with pytest.raises(TooManyRequests):
        ask(oplog, 2, charge)
    assert ask(oplog, 0, charge), "seq 1 cannot run before it"
    later(client, charge.payers[0], 4.9)
    assert passed(quotas, charge) == 0, "a call more is to be waited for"


@pytest.mark.parametrize("ahead", ["a step", "a batch behind a gap", "lost_batch", "forward_backward"])
def test_no_call_ahead_keeps_those_before_it_from_waiting_for_a_rate(oplog, ahead):
    """A step takes no tokens, a refused call takes nothing, and one call must not admit all calls before it."""
    charge = Charge(mine(Limits(tokens_per_s=0.01)), tokens=1000)
    match ahead:
        case "a step":
            ask(oplog, 2, replace(charge, tokens=0), "optim_step")
        case "a batch behind a gap":
            ask(oplog, 3, replace(charge, tokens=0))
        case "lost_batch" | "forward_backward":
            oplog.refuse(MODEL, 2, "not finite", ahead)
    assert ask(oplog, 0, charge)
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.commit(lease, 0, Result(b"{}"))
    with pytest.raises(TooManyRequests):
        ask(oplog, 1, charge)


def test_calls_sent_ahead_together_let_a_single_call_pass_over_the_rate(oplog):
    """Each of them is small enough to pass the rate itself."""
    charge = Charge(mine(Limits(tokens_per_s=1)), tokens=1)
    for seq in (0, 2, 4, 6):
        assert ask(oplog, seq, charge)
    large = replace(charge, tokens=10**6)
    lease = oplog.acquire(MODEL, "a/1")
    assert isinstance(lease, Lease)
    oplog.commit(lease, 0, Result(b"{}"))
    assert ask(oplog, 1, large)
    for seq in (1, 2):
        oplog.commit(lease, seq, Result(b"{}"))
    with pytest.raises(TooManyRequests):
        ask(oplog, 3, large)


def test_the_first_part_of_each_batch_passes(oplog):
    """The first part of the SDK's batch comes last, and the next batch after it."""
    charge = Charge(mine(Limits(tokens_per_s=1)), tokens=10**6)
    lease = None
    for first in (0, 3, 6):
        free = replace(charge, payers=())
        for seq in (first + 2, first + 1):
            assert ask(oplog, seq, free)
        assert ask(oplog, first, charge), "the first part"
        lease = lease or oplog.acquire(MODEL, "a/1")
        assert isinstance(lease, Lease)
        for seq in range(first, first + 3):
            oplog.commit(lease, seq, Result(b"{}"))


@at_once
def test_what_is_used_of_a_rate_is_in_its_own_unit(client, quotas):
    project, key = mine(Limits(requests_per_s=1, tokens_per_s=30))  # just enough: what passes meanwhile is little
    for _ in range(10):
        quotas.take(Charge((project, key), tokens=30))
    used = quotas.used(project)
    assert used.requests_per_s == pytest.approx(1, abs=0.5) and used.tokens_per_s == pytest.approx(30, abs=15)
    assert quotas.used(key) == Used(0, 0, 0, 0, None, None)

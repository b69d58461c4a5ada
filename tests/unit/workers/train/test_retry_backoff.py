from __future__ import annotations

from itertools import pairwise

import pytest

from workers.train import scheduler
from workers.train.scheduler import RetryBackoff

QUEUE = "train.base@a"
MODEL = "session:train:0"
Dispatch = tuple[str, str, str, str]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with one item: the time."""
    now = [1000.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def dispatched() -> list[Dispatch]:
    return []


@pytest.fixture
def waiting(dispatched: list[Dispatch], clock: list[float]) -> RetryBackoff:
    return RetryBackoff(lambda *send: dispatched.append(send), QUEUE)


def test_ops_that_wait_are_dispatched_once_in_order_when_the_model_advances(
    waiting: RetryBackoff, dispatched: list[Dispatch]
):
    waiting.add(MODEL, 7, "optim_step")
    waiting.add(MODEL, 6, "forward")
    waiting.add("other", 1, "forward")
    waiting.advanced(MODEL)
    waiting.advanced(MODEL)
    assert dispatched == [
        ("forward", f"{MODEL}:6", MODEL, QUEUE),
        ("optim_step", f"{MODEL}:7", MODEL, QUEUE),
    ]


def test_what_was_put_off_is_dispatched_again_without_end_after_longer_and_longer_pauses(
    waiting: RetryBackoff, dispatched: list[Dispatch], clock: list[float]
):
    began = clock[0]
    times = []
    for _ in range(600):
        if dispatched:
            dispatched.clear()
            times.append(clock[0] - began)
        waiting.retry_later(MODEL, 5, "save_weights")
        clock[0] += 1.0
        waiting.retry_due()
    assert times[:5] == [2, 6, 14, 30, 62]
    assert {after - before for before, after in pairwise(times[5:])} == {60}


def test_a_model_backs_off_until_its_pause_is_over_and_for_longer_after_each_retry_that_failed(
    waiting: RetryBackoff, dispatched: list[Dispatch], clock: list[float]
):
    """Whoever runs it then, and however many dispatches of it arrive meanwhile."""
    tried = []
    for second in range(100):
        if not waiting.is_backing_off(MODEL):
            tried.append(second)
        waiting.retry_later(MODEL, second, "forward")
        clock[0] += 1.0
    assert tried == [0, 2, 6, 14, 30, 62]
    assert dispatched == []
    waiting.advanced(MODEL)
    waiting.retry_later(MODEL, 7, "save_weights")
    clock[0] += 2.0
    assert not waiting.is_backing_off(MODEL), "a model that has advanced begins anew"


def test_only_the_first_of_what_was_put_off_is_dispatched_and_the_rest_behind_it(
    waiting: RetryBackoff, dispatched: list[Dispatch], clock: list[float]
):
    for seq in (5, 6, 7):
        waiting.retry_later(MODEL, seq, "save_weights")
    clock[0] += 2.0
    waiting.retry_due()
    assert [send[1] for send in dispatched] == [f"{MODEL}:5"]
    waiting.advanced(MODEL)
    assert [send[1] for send in dispatched[1:]] == [f"{MODEL}:{seq}" for seq in (5, 6, 7)]
    clock[0] += 1000.0
    waiting.retry_due()
    assert len(dispatched) == 4


def test_during_a_pause_dispatches_are_held_back_until_the_model_is_due_and_then_until_one_has_failed(
    waiting: RetryBackoff, clock: list[float]
):
    assert not waiting.holds_back(MODEL)
    for pause in (2.0, 4.0, 8.0):
        waiting.retry_later(MODEL, 5, "forward")
        assert waiting.holds_back(MODEL)
        clock[0] += pause
        assert not waiting.holds_back(MODEL)
        waiting.retry_due()
        assert not waiting.holds_back(MODEL), "the dispatch of the retry has to pass"
    waiting.advanced(MODEL)
    waiting.retry_later(MODEL, 6, "forward")
    assert waiting.holds_back(MODEL), "a model that has advanced begins anew"


def test_a_model_that_went_elsewhere_is_dispatched_no_more(
    waiting: RetryBackoff, dispatched: list[Dispatch], clock: list[float]
):
    waiting.retry_later(MODEL, 5, "save_weights")
    waiting.forget(MODEL)
    clock[0] += 1000.0
    waiting.retry_due()
    waiting.advanced(MODEL)
    assert dispatched == []

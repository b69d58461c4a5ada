from __future__ import annotations

from itertools import pairwise

import pytest

from workers.train import scheduler
from workers.train.scheduler import Parked

QUEUE = "train.base@a"
MODEL = "session:train:0"
Ring = tuple[str, str, str, str]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with one item: the time."""
    now = [1000.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def rung() -> list[Ring]:
    return []


@pytest.fixture
def waiting(rung: list[Ring], clock: list[float]) -> Parked:
    return Parked(lambda *ring: rung.append(ring), QUEUE)


def test_what_was_parked_is_rung_once_in_order_when_the_model_moves_on(waiting: Parked, rung: list[Ring]):
    waiting.park(MODEL, 7, "optim_step")
    waiting.park(MODEL, 6, "forward")
    waiting.park("other", 1, "forward")
    waiting.moved_on(MODEL)
    waiting.moved_on(MODEL)
    assert rung == [
        ("forward", f"{MODEL}:6", MODEL, QUEUE),
        ("optim_step", f"{MODEL}:7", MODEL, QUEUE),
    ]


def test_what_was_put_off_is_rung_again_without_end_after_longer_and_longer_pauses(
    waiting: Parked, rung: list[Ring], clock: list[float]
):
    began = clock[0]
    times = []
    for _ in range(600):
        if rung:
            rung.clear()
            times.append(clock[0] - began)
        waiting.put_off(MODEL, 5, "save_weights")
        clock[0] += 1.0
        waiting.ring_due()
    assert times[:5] == [2, 6, 14, 30, 62]
    assert {after - before for before, after in pairwise(times[5:])} == {60}


def test_only_the_first_of_what_was_put_off_is_rung_and_the_rest_behind_it(
    waiting: Parked, rung: list[Ring], clock: list[float]
):
    for seq in (5, 6, 7):
        waiting.put_off(MODEL, seq, "save_weights")
    clock[0] += 2.0
    waiting.ring_due()
    assert [ring[1] for ring in rung] == [f"{MODEL}:5"]
    waiting.moved_on(MODEL)
    assert [ring[1] for ring in rung[1:]] == [f"{MODEL}:{seq}" for seq in (5, 6, 7)]
    clock[0] += 1000.0
    waiting.ring_due()
    assert len(rung) == 4


def test_a_model_that_went_elsewhere_is_rung_no_more(waiting: Parked, rung: list[Ring], clock: list[float]):
    waiting.put_off(MODEL, 5, "save_weights")
    waiting.forget(MODEL)
    clock[0] += 1000.0
    waiting.ring_due()
    waiting.moved_on(MODEL)
    assert rung == []

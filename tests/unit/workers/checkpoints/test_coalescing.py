from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.unit.workers.conftest import await_true
from workers.checkpoints import coalescing
from workers.checkpoints.coalescing import CoalescingWorker

SOON_S = 60.0


class Work:
    """Records its items; waits for `gate` first, and fails while `broken`."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.tried = 0
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def __call__(self, key: str, item: int) -> None:
        self.tried += 1
        assert self.gate.wait(SOON_S)
        if self.broken:
            raise OSError("disk full")
        self.done.append((key, item))


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def background(work: Work) -> Iterator[CoalescingWorker[int]]:
    background = CoalescingWorker("test", work, retry_s=0.01)
    yield background
    work.gate.set()
    background.close(SOON_S)


def begin(background: CoalescingWorker[int], work: Work, item: int) -> None:
    """Starts work on `item`, which lasts until the gate opens."""
    work.gate.clear()
    tried = work.tried
    background.put("a", item)
    await_true(lambda: work.tried > tried, "it was not begun")


def test_the_newest_item_takes_the_place_of_those_that_wait(background: CoalescingWorker[int], work: Work):
    begin(background, work, 1)
    for item in (2, 3, 4):
        background.put("a", item, at_once=True)
    background.put("b", 9)
    work.gate.set()
    await_true(lambda: len(work.done) == 3, "not all was done")
    assert sorted(work.done) == [("a", 1), ("a", 4), ("b", 9)]


def test_what_failed_is_done_again_until_it_works(background: CoalescingWorker[int], work: Work):
    work.broken = True
    background.put("a", 1)
    await_true(lambda: work.tried >= 3, "it was not tried again")
    work.broken = False
    await_true(lambda: work.done, "it was not done in the end")
    assert work.done == [("a", 1)]


def test_what_failed_gives_way_to_a_newer_item(background: CoalescingWorker[int], work: Work):
    work.broken = True
    begin(background, work, 1)
    background.put("a", 2)
    work.gate.set()
    await_true(lambda: work.tried >= 3, "it was not tried again")
    work.broken = False
    await_true(lambda: work.done, "it was not done in the end")
    assert work.done == [("a", 2)]


def test_a_key_that_took_long_rests_while_others_have_their_turn(
    background: CoalescingWorker[int], work: Work, monkeypatch: pytest.MonkeyPatch
):
    now = [1000.0]
    monkeypatch.setattr(coalescing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    begin(background, work, 1)
    now[0] += 10.0
    work.gate.set()
    await_true(lambda: background.item("a") is None, "it was not done")
    now[0] += 89.0
    assert not background.ready("a")
    assert background.ready("b")
    background.put("a", 2)
    background.put("b", 3)
    await_true(lambda: len(work.done) == 2, "the other had no turn")
    now[0] += 2.0
    background.put("b", 4)
    await_true(lambda: len(work.done) == 4, "not all was done")
    assert work.done == [("a", 1), ("b", 3), ("a", 2), ("b", 4)]


def test_an_urgent_item_is_done_without_a_rest(background: CoalescingWorker[int], work: Work):
    background._rests["a"] = time.monotonic() + 10 * SOON_S
    background.put("a", 1)
    background.put("a", 2, at_once=True)
    await_true(lambda: work.done, "it had to wait")
    assert work.done == [("a", 2)]


def test_to_finish_is_to_wait_until_it_is_done(background: CoalescingWorker[int], work: Work):
    begin(background, work, 1)
    background.put("a", 2)
    threading.Timer(0.1, work.gate.set).start()
    background.finish("a", SOON_S)
    assert work.done == [("a", 1), ("a", 2)]


def test_to_finish_does_not_wait_for_what_fails_again(background: CoalescingWorker[int], work: Work):
    work.broken = True
    background.put("a", 1)
    waiter = threading.Thread(target=background.finish, args=("a", 10 * SOON_S), daemon=True)
    waiter.start()
    waiter.join(SOON_S)
    assert not waiter.is_alive()
    assert work.tried >= 1


def test_to_finish_does_not_wait_for_ever(background: CoalescingWorker[int], work: Work):
    begin(background, work, 1)
    began = time.monotonic()
    background.finish("a", 0.05)
    assert time.monotonic() - began < SOON_S / 2


def test_what_is_dropped_is_not_done(background: CoalescingWorker[int], work: Work):
    begin(background, work, 1)
    background.put("a", 2)
    background.drop("a")
    background.put("b", 3)
    work.gate.set()
    await_true(lambda: ("b", 3) in work.done, "the thread went on")
    assert work.done == [("a", 1), ("b", 3)]


def test_a_closed_one_ends_behind_what_it_is_doing(background: CoalescingWorker[int], work: Work):
    begin(background, work, 1)
    background.put("a", 2)
    threading.Timer(0.1, work.gate.set).start()
    background.close(SOON_S)
    assert work.done == [("a", 1)]

"""The number of running adapters is limited. The others take turns in order, and none waits forever."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import ExitStack, suppress

import pytest

from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.process.fair_queue import FairQueue
from workers.sample.adapters import AdapterScheduler


class Requests:
    """Requests that run from their admission until the test ends them."""

    def __init__(self, most: int, **project_of: str) -> None:
        self.fair_queue, self._project_of = FairQueue(), project_of
        self._scheduler = AdapterScheduler(most, self.fair_queue)
        self._end: dict[str, threading.Event] = {}
        self._handles: defaultdict[str, RequestHandle] = defaultdict(RequestHandle)
        self._lock = threading.Lock()
        self.running: list[str] = []
        self.order: list[str] = []
        self._come = 0

    def come(self, *names: str) -> None:
        """Starts requests. A name is its adapter's letter and a number. Each request has arrived before the next one
        starts."""
        for name in names:
            self._end[name] = threading.Event()
            self._come += 1
            threading.Thread(target=self._run, args=(name,), daemon=True).start()
            await_true(lambda: self._arrived() == self._come, f"{name} came")

    def abort(self, name: str) -> None:
        self._come -= 1
        self._handles[name].abort()
        await_true(lambda: self._arrived() == self._come, f"{name} gave up")

    def end(self, *names: str) -> None:
        for name in names:
            self._end[name].set()
            await_true(lambda name=name: name not in self.running, f"{name} ended")

    def await_running(self, *names: str) -> None:
        await_true(lambda: sorted(self.running) == sorted(names), f"{names} run; {self.running} do")

    def _arrived(self) -> int:
        waiting = sum(map(len, self._scheduler._waiting.values()))
        return waiting + len(self.order)

    def _run(self, name: str) -> None:
        with suppress(Aborted), self._scheduler.turn(name[0], self._project_of.get(name[0], "me"), self._handles[name]):
            with self._lock:
                self.order.append(name)
                self.running.append(name)
            self._end[name].wait(600)
            self.running.remove(name)


@pytest.fixture
def two() -> Requests:
    return Requests(2)


def test_all_requests_of_the_adapters_that_are_in_run_together(two: Requests):
    two.come("a1", "b1", "a2", "b2", "a3")
    two.await_running("a1", "a2", "a3", "b1", "b2")


def test_a_further_adapter_waits_until_one_has_ended(two: Requests):
    two.come("a1", "a2", "b1", "c1", "d1")
    two.end("a1")
    two.await_running("a2", "b1")
    two.end("a2")
    two.await_running("b1", "c1")
    two.end("b1")
    two.await_running("c1", "d1")


def test_an_adapter_that_is_in_does_not_keep_the_others_out_for_ever(two: Requests):
    """Requests for the running adapter that arrive after requests for others get their turn after those."""
    two.come("a1", "b1", "c1", "a2", "b2")
    two.await_running("a1", "b1")
    two.end("a1")
    two.await_running("b1", "c1")
    two.end("b1")
    two.await_running("a2", "c1")
    two.end("a2")
    two.await_running("b2", "c1")


def test_an_adapter_takes_all_along_that_waits_for_it(two: Requests):
    two.come("a1", "b1", "c1", "d1", "c2", "c3")
    two.end("a1")
    two.await_running("b1", "c1", "c2", "c3")


def test_streams_of_requests_for_more_adapters_than_fit_are_served_evenly(two: Requests):
    """Five adapters, two at a time. When a request ends, the next one for the same adapter is already waiting."""
    names = "abcde"
    two.come(*(f"{name}1" for name in names), *(f"{name}2" for name in names))
    for _ in range(20):
        first = two.running[0]
        two.come(f"{first[0]}{int(first[1:]) + 2}")
        two.end(first)
        await_true(lambda: len({name[0] for name in two.running}) == 2, "two adapters run")
    turns = {name: sum(1 for ran in two.order if ran[0] == name) for name in names}
    assert max(turns.values()) <= min(turns.values()) + 2, turns


def test_the_project_that_had_least_is_first_and_its_adapters_are_in_the_order_they_came():
    one = Requests(1, a="heavy", b="heavy", c="light", d="light")
    one.fair_queue.charge("heavy", 10.0)
    one.come("a1", "b1", "c1", "d1")
    for name, following in (("a1", "c1"), ("c1", "d1"), ("d1", "b1")):
        one.end(name)
        one.await_running(following)


def test_what_comes_for_an_adapter_that_is_in_waits_behind_a_project_that_had_less():
    one = Requests(1, a="heavy", b="light")
    one.fair_queue.charge("heavy", 10.0)
    one.come("a1", "b1", "a2")
    one.end("a1")
    one.await_running("b1")


def test_a_request_that_is_stopped_while_it_waits_makes_way(two: Requests):
    two.come("a1", "b1", "c1", "a2", "d1")
    two.abort("c1")
    two.await_running("a1", "a2", "b1")
    two.end("b1")
    two.await_running("a1", "a2", "d1")


def test_a_request_that_fails_frees_its_place():
    scheduler = AdapterScheduler(1, FairQueue())
    with pytest.raises(ValueError), scheduler.turn("a", "me", RequestHandle()):
        raise ValueError
    with ExitStack() as stack:
        stack.enter_context(scheduler.turn("b", "me", RequestHandle()))

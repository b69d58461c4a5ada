"""Batch admission to a sampler's engine: a batch and a little more, the fairest first, never filled by one project."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from contextlib import suppress

import numpy as np
import pytest

from app.domain.sampling import SampleRequest
from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, Watch
from workers.process.fair_queue import Shares, equal
from workers.sample.admission import Gate

BATCH = 8


class Engine:
    """Requests that stay in the batch until the test ends them; each arrives before the next one."""

    def __init__(self, weight_of=equal) -> None:
        self.shares = Shares()
        self._gate = Gate(self.shares, weight_of, BATCH)
        self._ends: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()
        self.watches: list[Watch] = []
        self.inside: list[tuple[int, str]] = []
        self.order: list[str] = []
        self._gone = self._stopped = 0

    def come(self, project: str, *, samples: int = 1, tokens: int = 10, took: int | None = None) -> int:
        number = len(self.watches)
        self.watches.append(Watch())
        request = SampleRequest(np.zeros(1, np.int32), samples, tokens, 0)
        threading.Thread(target=self._run, args=(number, project, request, took), daemon=True).start()
        await_true(lambda: self._arrived() == len(self.watches) - self._stopped, f"request {number} of {project} came")
        return number

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self._ends[number].set()
            await_true(lambda number=number: number not in [one for one, _ in self.inside], f"{number} ended")

    def abort(self, number: int) -> None:
        gone = self._gone
        self._stopped += 1
        self.watches[number].abort()
        await_true(lambda: self._gone > gone, f"{number} gave up")

    def serve(self, turns: int) -> Counter[str]:
        """Ends the oldest request until `turns` more are admitted. Returns the projects of the admitted requests."""
        start = len(self.order)
        while len(self.order) < start + turns:
            inside = len(self.order)
            self.end(self.inside[0][0])
            await_true(lambda inside=inside: len(self.order) > inside, "the next is let in")
        return Counter(self.order[start:])

    def level_out(self) -> None:
        """A project that arrives while another one has the whole batch goes first until it has received as much
        service."""
        self.serve(2 * BATCH)

    def await_inside(self, count: int) -> None:
        await_true(lambda: len(self.inside) == count, f"{count} are inside, not {len(self.inside)}")

    def _arrived(self) -> int:
        return sum(map(len, self._gate._waiting.values())) + len(self.order)

    def _run(self, number: int, project: str, request: SampleRequest, took: int | None) -> None:
        try:
            with suppress(Aborted), self._gate.turn(project, request, self.watches[number]):
                with self._lock:
                    self.inside.append((number, project))
                    self.order.append(project)
                self._ends[number].wait(600)
                self.watches[number].took += request.max_tokens if took is None else took
                self.inside.remove((number, project))
        finally:
            self._gone += 1


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_one_project_alone_has_the_whole_batch_and_the_next_ready(engine: Engine):
    for _ in range(3 * BATCH):
        engine.come("alone")
    engine.await_inside(BATCH + 1)
    engine.end(0)
    engine.await_inside(BATCH + 1)


def test_a_light_project_waits_for_one_to_end_however_many_of_another_wait(engine: Engine):
    for _ in range(5 * BATCH):
        engine.come("heavy")
    engine.come("light")
    engine.end(0)
    await_true(lambda: engine.order[-1] == "light", "it is next")


def test_projects_are_served_alike_by_tokens_not_by_requests(engine: Engine):
    for _ in range(90):
        engine.come("short", tokens=9)
    for _ in range(60):
        engine.come("long", tokens=29)
    engine.level_out()
    served = engine.serve(80)
    assert served["short"] == pytest.approx(3 * served["long"], abs=6)


def test_a_weight_is_a_share():
    engine = Engine({"one": 1.0, "three": 3.0}.__getitem__)
    for _ in range(50):
        engine.come("one")
        engine.come("three")
    engine.level_out()
    served = engine.serve(40)
    assert served["three"] == pytest.approx(3 * served["one"], abs=4)


def test_what_was_not_drawn_is_given_back(engine: Engine):
    """Both projects ask for the same number of tokens, and one of them uses a tenth of it."""
    for _ in range(80):
        engine.come("brief", tokens=999, took=99)
        engine.come("full", tokens=999, took=999)
    served = engine.serve(60)
    assert served["brief"] >= 4 * served["full"]


def test_a_sequence_that_has_ended_makes_room_before_its_request_has(engine: Engine):
    engine.come("a", samples=BATCH)
    engine.come("a", samples=1)
    engine.come("b", samples=1)
    engine.await_inside(2)
    ended = engine.watches[0].ended
    assert ended is not None
    ended()
    engine.await_inside(3)
    engine.end(0)
    for _ in range(BATCH + 5):
        engine.come("c")
    engine.await_inside(BATCH + 1)


def test_a_request_with_more_sequences_than_a_batch_goes_in_too(engine: Engine):
    engine.come("a")
    engine.come("a", samples=10 * BATCH)
    engine.come("a")
    engine.await_inside(2)
    engine.end(1)
    engine.await_inside(2)


def test_what_is_stopped_while_it_waits_makes_way_and_is_not_charged(engine: Engine):
    for _ in range(BATCH + 1):
        engine.come("a")
    waiting = [engine.come("b", tokens=10**6), engine.come("b")]
    engine.abort(waiting[0])
    engine.end(0)
    await_true(lambda: engine.order[-1] == "b", "the other one of b is next")
    engine.await_inside(BATCH + 1)
    assert engine.shares.place("b") - engine.shares.place("new") < 100


def test_what_is_stopped_while_it_runs_is_charged_what_it_drew_and_its_prompt(engine: Engine):
    watch, request = Watch(), SampleRequest(np.zeros(3, np.int32), 2, 10**6, 0)
    with pytest.raises(Aborted), engine._gate.turn("a", request, watch):
        watch.took += 4
        raise Aborted
    assert watch.took == 3 + 4
    assert engine.shares.place("a") - engine.shares.place("new") == 3 + 4


def test_one_that_fails_gives_its_place_back(engine: Engine):
    gate, request = engine._gate, SampleRequest(np.zeros(1, np.int32), 10 * BATCH, 5, 0)
    for _ in range(3):
        with pytest.raises(ValueError), gate.turn("a", request, Watch()):
            raise ValueError
    with gate.turn("a", request, Watch()):
        pass


def test_a_light_project_waits_for_one_to_end_though_all_before_it_were_charged_for_more_than_they_drew(engine: Engine):
    """A request whose sequences end makes room before its charge is corrected. For a moment two batches are charged."""
    for _ in range(6 * BATCH):
        engine.come("heavy", tokens=999, took=10)
    for watch in engine.watches[: BATCH + 1]:
        assert watch.ended is not None
        watch.ended()
    engine.await_inside(2 * BATCH + 2)
    engine.end(*range(BATCH + 1))
    engine.come("light")
    assert engine.serve(3)["light"] == 1

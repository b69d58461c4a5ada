"""Batch admission to a sampler's engine: a batch and a little more, the fairest first, never filled by one project."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from app.domain.sampling import SampleRequest
from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.process.fair_queue import FairQueue, equal
from workers.sample.admission import BatchAdmission

BATCH = 8


class Engine:
    """Requests that stay in the batch until the test ends them; each arrives before the next one.

    At the end of a `with` block those that are left end too, as their threads would outlive the test.
    """

    def __init__(self, weight_of=equal) -> None:
        self.fair_queue = FairQueue()
        self._batch_admission = BatchAdmission(self.fair_queue, weight_of, BATCH)
        self._ends: list[threading.Event] = []
        self._lock = threading.Lock()
        self.handles: list[RequestHandle] = []
        self.inside: list[tuple[int, str]] = []
        self.order: list[str] = []
        self._gone = self._stopped = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for handle, end in zip(self.handles, self._ends, strict=True):
            handle.abort()
            end.set()

    def come(self, project: str, *, samples: int = 1, tokens: int = 10, took: int | None = None) -> int:
        number = len(self.handles)
        self.handles.append(RequestHandle())
        self._ends.append(threading.Event())
        request = SampleRequest(np.zeros(1, np.int32), samples, tokens, 0)
        threading.Thread(target=self._run, args=(number, project, request, took), daemon=True).start()
        self._settle()
        return number

    def end(self, *numbers: int) -> None:
        for number in numbers:
            gone = self._gone
            self._ends[number].set()
            await_true(lambda gone=gone: self._gone > gone, f"{number} ended")
            self._settle()

    def abort(self, number: int) -> None:
        gone = self._gone
        self._stopped += 1
        self.handles[number].abort()
        await_true(lambda: self._gone > gone, f"{number} gave up")

    def serve(self, turns: int) -> Counter[str]:
        """Ends the oldest request until `turns` more are admitted. Returns the projects of the admitted requests."""
        start = len(self.order)
        while len(self.order) < start + turns:
            self.end(self.inside[0][0])
        return Counter(self.order[start:])

    def level_out(self) -> None:
        """A project that arrives while another one has the whole batch goes first until it has received as much
        service."""
        self.serve(2 * BATCH)

    def await_inside(self, count: int) -> None:
        await_true(lambda: len(self.inside) == count, f"{count} are inside, not {len(self.inside)}")

    def _settle(self) -> None:
        """Waits until each request that came waits or was admitted."""

        def is_settled() -> bool:
            waiting = sum(map(len, self._batch_admission._waiting.values()))
            return waiting + len(self.order) == len(self.handles) - self._stopped

        await_true(is_settled, "all requests came")

    def _run(self, number: int, project: str, request: SampleRequest, took: int | None) -> None:
        try:
            with suppress(Aborted), self._batch_admission.slot(project, request, self.handles[number]):
                with self._lock:
                    self.inside.append((number, project))
                    self.order.append(project)
                self._ends[number].wait(600)
                self.handles[number].sampled_tokens += request.max_tokens if took is None else took
                self.inside.remove((number, project))
        finally:
            self._gone += 1


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def weighted_engine() -> Iterator[Engine]:
    with Engine({"one": 1.0, "three": 3.0}.__getitem__) as engine:
        yield engine


def test_one_project_alone_has_the_whole_batch_and_the_next_ready(engine: Engine):
    for _ in range(3 * BATCH):
        engine.come("alone")
    engine.await_inside(BATCH + 1)
    engine.end(0)
    engine.await_inside(BATCH + 1)


def test_a_light_project_waits_for_none_to_end_up_to_its_share_of_the_batch(engine: Engine):
    """The engine makes room for it."""
    for _ in range(5 * BATCH):
        engine.come("heavy")
    for _ in range(BATCH):
        engine.come("light")
    engine.await_inside(BATCH + 1 + BATCH // 2)
    assert Counter(engine.order) == {"heavy": BATCH + 1, "light": BATCH // 2}
    engine.end(0)
    assert len(engine.order) == BATCH + 1 + BATCH // 2, "no room for more before the batch is back to its size"


def test_a_request_with_more_sequences_than_a_batch_holds_up_no_other_project(engine: Engine):
    engine.come("long", samples=10 * BATCH, tokens=10**4)
    engine.come("long")
    engine.come("short")
    engine.await_inside(2)
    assert engine.order == ["long", "short"]


def test_shares_of_the_batch_are_in_proportion_to_the_weights(weighted_engine: Engine):
    for _ in range(2 * BATCH):
        weighted_engine.come("one")
    for _ in range(BATCH):
        weighted_engine.come("three")
    assert Counter(weighted_engine.order) == {"one": BATCH + 1, "three": BATCH * 3 // 4}


def test_a_project_that_was_alone_for_long_owes_others_its_last_request_at_most(engine: Engine):
    """Service that nobody else asked for is no debt."""
    for _ in range(20):
        engine.end(engine.come("alone", samples=BATCH, tokens=10**4, took=BATCH * 10**4))
    debt = engine.fair_queue.virtual_time("alone") - engine.fair_queue.virtual_time("new")
    assert 0 < debt <= 1 + BATCH * 10**4


def test_projects_are_served_alike_by_tokens_not_by_requests(engine: Engine):
    for _ in range(90):
        engine.come("short", tokens=9)
    for _ in range(60):
        engine.come("long", tokens=29)
    engine.level_out()
    served = engine.serve(80)
    assert served["short"] == pytest.approx(3 * served["long"], abs=6)


def test_service_is_in_proportion_to_the_weights(weighted_engine: Engine):
    for _ in range(50):
        weighted_engine.come("one")
        weighted_engine.come("three")
    weighted_engine.level_out()
    served = weighted_engine.serve(40)
    assert served["three"] == pytest.approx(3 * served["one"], abs=4)


def test_tokens_that_were_not_sampled_are_refunded(engine: Engine):
    """Both projects ask for the same number of tokens, and one of them uses a tenth of it."""
    for _ in range(80):
        engine.come("brief", tokens=999, took=99)
        engine.come("full", tokens=999, took=999)
    served = engine.serve(60)
    assert served["brief"] >= 4 * served["full"]


def test_a_sequence_that_has_ended_makes_room_before_its_request_has(engine: Engine):
    engine.come("a", samples=BATCH)
    for _ in range(2):
        engine.come("a", samples=1)
    engine.await_inside(2)
    ended = engine.handles[0].on_end
    assert ended is not None
    ended()
    engine.await_inside(3)
    engine.end(0)
    for _ in range(BATCH + 5):
        engine.come("a")
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
    for _ in range(BATCH // 2):
        engine.come("b")
    waiting = [engine.come("b", tokens=10**6), engine.come("b")]
    engine.abort(waiting[0])
    engine.end(*range(BATCH // 2))
    engine.await_inside(BATCH + 1)
    engine.end(BATCH // 2)
    assert engine.inside[-1] == (waiting[1], "b"), "the other one of b is next"
    engine.await_inside(BATCH + 1)
    assert engine.fair_queue.virtual_time("b") - engine.fair_queue.virtual_time("new") < 100


def test_what_is_stopped_while_it_runs_is_charged_what_it_drew_and_its_prompt(engine: Engine):
    handle, request = RequestHandle(), SampleRequest(np.zeros(3, np.int32), 2, 10**6, 0)
    with pytest.raises(Aborted), engine._batch_admission.slot("a", request, handle):
        handle.prompt_tokens, handle.sampled_tokens = 3, 4
        raise Aborted
    assert handle.tokens_used == 3 + 4
    assert engine.fair_queue.virtual_time("a") - engine.fair_queue.virtual_time("new") == 3 + 4


def test_one_that_fails_frees_its_place(engine: Engine):
    batch_admission, request = engine._batch_admission, SampleRequest(np.zeros(1, np.int32), 10 * BATCH, 5, 0)
    for _ in range(3):
        with pytest.raises(ValueError), batch_admission.slot("a", request, RequestHandle()):
            raise ValueError
    with batch_admission.slot("a", request, RequestHandle()):
        pass


def test_a_light_project_goes_first_though_all_before_it_were_charged_for_more_than_they_drew(engine: Engine):
    """A request whose sequences end makes room before its charge is corrected. For a moment two batches are charged."""
    for _ in range(6 * BATCH):
        engine.come("heavy", tokens=999, took=10)
    for handle in engine.handles[: BATCH + 1]:
        assert handle.on_end is not None
        handle.on_end()
    engine.await_inside(2 * BATCH + 2)
    engine.end(*range(BATCH + 1))
    for _ in range(BATCH):
        engine.come("light")
    assert engine.serve(3)["light"] == 3


def test_projects_that_have_left_take_no_share_of_the_batch():
    with Engine() as engine:
        engine.end(*[engine.come(f"left {number}") for number in range(BATCH)])
        for project, count in (("long", 12), ("short", 6)):
            for _ in range(count):
                engine.come(project)
        assert Counter(project for _, project in engine.inside) == {"long": BATCH + 1, "short": BATCH // 2}

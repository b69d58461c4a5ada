"""A trainer and a sampler use GPUs in turns: never both at once, and neither waits for ever.

Two GpuTurns of one process are to each other as those of two processes: each opens the lock files itself.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from app.errors import NoTurnYet, SetupError, Unavailable
from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.process.gpu_turns import GpuTurns

_FOREVER_S = 60.0


class Party:
    """A process's turns, and what happened in them: `events` is shared by all parties of a test."""

    def __init__(self, name: str, file: Path, events: list[str], turn_s: float, idle_s: float) -> None:
        self.name, self.events = name, events
        self.fails = False
        begins, ends = (partial(self._note, what) for what in ("begins", "ends"))
        self.turns = GpuTurns(file, begins, ends, 60.0, turn_s, idle_s)

    def _note(self, what: str) -> None:
        assert not self.fails
        self.events.append(f"{self.name} {what}")

    def use(
        self, what: str = "works", until: threading.Event | None = None, handle: RequestHandle | None = None
    ) -> None:
        with self.turns.use(handle):
            self.events.append(f"{self.name} {what}")
            assert until is None or until.wait(_FOREVER_S)


Parties = Callable[..., Sequence[Party]]


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def parties(tmp_path: Path, events: list[str]) -> Iterator[Parties]:
    """Makes a trainer and a sampler that share GPUs, with turns of at least `turn_s`, or `idle_s` where idle."""
    made: list[Party] = []

    def make(turn_s: float = 0.0, idle_s: float = 0.1) -> Sequence[Party]:
        made.extend(Party(name, tmp_path / "gpus", events, turn_s, idle_s) for name in ("trainer", "sampler"))
        return made

    yield make
    for party in made:
        party.turns.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def done(future: Future[None]) -> None:
    future.result(_FOREVER_S)


def test_two_that_are_always_busy_alternate_and_never_overlap(
    parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, sampler = parties()
    ended = threading.Event()

    def go_on(party: Party) -> None:
        while not ended.wait(0.001):
            party.use()

    running = [pool.submit(go_on, party) for party in (trainer, sampler, sampler, sampler)]
    try:
        await_true(lambda: min(map(events.count, ("trainer ends", "sampler ends"))) >= 5, "five turns of each")
    finally:
        busy = list(events)
        ended.set()
    for each in running:
        done(each)
    holder = ""
    for event in events:
        name, what = event.split()
        assert what == "begins" if not holder else name == holder
        holder = "" if what == "ends" else name
    turns = [event.split()[0] for event in busy if event.endswith("begins")]
    assert all(one != other for one, other in pairwise(turns))


def test_a_turn_goes_on_while_nobody_else_asks(
    parties: Parties, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = parties()
    looks, is_wanted = [], trainer.turns._is_wanted
    monkeypatch.setattr(trainer.turns, "_is_wanted", lambda: looks.append(is_wanted()) or looks[-1])
    trainer.use()
    await_true(lambda: len(looks) >= 2 or "trainer ends" in events, "the trainer looks twice whether it is asked")
    trainer.use()
    assert events == ["trainer begins", *["trainer works"] * 2]
    assert trainer.turns.held


def test_an_idle_holder_gives_its_turn_away_however_long_it_may_last(parties: Parties, events: list[str]) -> None:
    trainer, sampler = parties(turn_s=10 * _FOREVER_S)
    trainer.use()
    sampler.use()
    assert events[2:] == ["trainer ends", "sampler begins", "sampler works"]
    assert not trainer.turns.held


def test_a_holder_that_pauses_keeps_its_turn_for_a_while(
    parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, sampler = parties(turn_s=10 * _FOREVER_S, idle_s=10 * _FOREVER_S)
    trainer.use()
    sample = pool.submit(sampler.use)
    await_true(trainer.turns._is_wanted, "the sampler asks")
    trainer.turns._used_at -= _FOREVER_S
    assert not trainer.turns._is_over(time.monotonic())
    trainer.use()
    assert events == ["trainer begins", *["trainer works"] * 2]
    trainer.turns._idle_s = 0.0
    done(sample)


def test_a_turn_that_nobody_waits_for_any_more_does_not_begin(
    parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, sampler = parties()
    may_end, handle = threading.Event(), RequestHandle()
    step = pool.submit(trainer.use, "works", may_end)
    await_true(lambda: trainer.turns.held, "the trainer has its turn")
    request = pool.submit(sampler.use, "works", None, handle)
    await_true(lambda: not trainer.turns.held, "the sampler asks")
    handle.abort()
    with pytest.raises(Aborted):
        request.result(_FOREVER_S)
    may_end.set()
    done(step)
    trainer.use()
    assert "sampler begins" not in events


def test_one_that_waits_in_slices_gets_its_turn(parties: Parties, events: list[str], pool: ThreadPoolExecutor) -> None:
    trainer, sampler = parties(idle_s=_FOREVER_S)
    may_end = threading.Event()
    step = pool.submit(trainer.use, "works", may_end)
    await_true(lambda: trainer.turns.held, "the trainer has its turn")
    for _ in range(3):
        with pytest.raises(NoTurnYet), sampler.turns.use(within_s=0.01):
            events.append("sampler works too early")
    may_end.set()
    done(step)
    await_true(lambda: not sampler.turns._stall_detector.seconds and "trainer ends" in events, "the GPU is free")
    sampler.use()
    assert events == ["trainer begins", "trainer works", "trainer ends", "sampler begins", "sampler works"]


def test_a_process_whose_folder_was_removed_makes_it_again(tmp_path: Path, events: list[str]) -> None:
    file = tmp_path / "turns" / "gpus"
    trainer = Party("trainer", file, events, 0.0, 0.1)
    trainer.use()
    shutil.rmtree(file.parent)
    await_true(lambda: not trainer.turns.held, "the trainer's turn ends")
    trainer.use()
    assert events == ["trainer begins", "trainer works", "trainer ends", "trainer begins", "trainer works"]
    trainer.turns.close()


def test_two_whose_files_were_removed_meet_at_the_new_ones(
    tmp_path: Path, parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, _ = parties()
    trainer.use()
    for file in tmp_path.glob("gpus.*"):
        file.unlink()
    await_true(lambda: "trainer ends" in events, "the trainer's turn ends")
    sampler = Party("sampler", tmp_path / "gpus", events, 0.0, 0.1)  # started again
    may_end = threading.Event()
    sample = pool.submit(sampler.use, "works", may_end)
    await_true(lambda: sampler.turns.held, "the sampler has its turn")
    step = pool.submit(trainer.use)
    await_true(lambda: step.done() or sampler.turns._is_wanted(), "the trainer waits")
    before = list(events)
    may_end.set()
    done(sample)
    done(step)
    sampler.turns.close()
    assert before == ["trainer begins", "trainer works", "trainer ends", "sampler begins", "sampler works"]


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(SetupError, match=f"belongs to user {owner}, .* set engine.handover_dir to another folder"):
        GpuTurns(tmp_path / "gpus", lambda: None, lambda: None, 60.0)


def test_a_busy_holder_ends_what_it_has_begun_and_begins_nothing_new(
    parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, sampler = parties()
    first_may_end, second_may_end = threading.Event(), threading.Event()
    first, second = (pool.submit(sampler.use, "works", end) for end in (first_may_end, second_may_end))
    await_true(lambda: events.count("sampler works") == 2, "both requests are in hand")
    step = pool.submit(trainer.use)
    await_true(lambda: not sampler.turns.held, "the sampler takes no new request")
    late = pool.submit(sampler.use, "works later")
    await_true(lambda: sampler.turns._waiting, "a later request waits")
    first_may_end.set()
    done(first)
    before_the_second = list(events)
    second_may_end.set()
    assert before_the_second == ["sampler begins", *["sampler works"] * 2]
    for each in (second, step, late):
        done(each)
    switches = ["sampler ends", "trainer begins", "trainer works", "trainer ends", "sampler begins"]
    assert events[-6:] == [*switches, "sampler works later"]


def test_a_block_inside_another_waits_for_nothing(
    parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, sampler = parties()
    with trainer.turns.use():
        step = pool.submit(sampler.use)
        await_true(lambda: not trainer.turns.held, "the trainer gives its turn away")
        trainer.use("works inside")
    done(step)
    assert events.index("trainer works inside") < events.index("trainer ends") < events.index("sampler begins")


def test_a_request_that_is_cancelled_before_its_turn_ends_at_once(parties: Parties, pool: ThreadPoolExecutor) -> None:
    trainer, sampler = parties()
    may_end, handle = threading.Event(), RequestHandle()
    step = pool.submit(trainer.use, "works", may_end)
    await_true(lambda: trainer.turns.held, "the trainer has its turn")
    request = pool.submit(sampler.use, "works", None, handle)
    handle.abort()
    with pytest.raises(Aborted):
        request.result(_FOREVER_S)
    may_end.set()
    done(step)


def test_one_that_waits_for_its_turn_is_healthy_and_a_switch_that_hangs_is_not(
    tmp_path: Path, parties: Parties, pool: ThreadPoolExecutor
) -> None:
    trainer, _ = parties()
    may_end, may_wake = threading.Event(), threading.Event()
    sampler = GpuTurns(tmp_path / "gpus", lambda: assert_set(may_wake), lambda: None, deadline_s=0.0)
    step = pool.submit(trainer.use, "works", may_end)
    await_true(lambda: trainer.turns.held, "the trainer has its turn")
    request = pool.submit(_use, sampler)
    await_true(lambda: not trainer.turns.held, "the sampler waits for its turn")
    assert sampler.healthy()
    may_end.set()
    await_true(lambda: not sampler.healthy(), "the sampler wakes for too long")
    may_wake.set()
    done(request)
    done(step)
    await_true(sampler.healthy, "the sampler is awake")
    sampler.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(_FOREVER_S)


def _use(turns: GpuTurns) -> None:
    with turns.use():
        pass


def test_a_switch_that_fails_ends_the_process_and_keeps_the_gpus_until_then(
    parties: Parties, events: list[str], pool: ThreadPoolExecutor
) -> None:
    trainer, sampler = parties()
    sampler.fails = True
    with pytest.raises(Unavailable, match="about to end"):
        sampler.use()
    assert not sampler.turns.healthy()
    step = pool.submit(trainer.use)
    await_true(sampler.turns._is_wanted, "the trainer waits")
    assert events == []
    _release(sampler.turns)  # as the kernel does
    done(step)


def _release(turns: GpuTurns) -> None:
    os.close(turns._turn)


def test_one_that_waits_when_its_process_ends_gets_an_answer(parties: Parties, pool: ThreadPoolExecutor) -> None:
    trainer, sampler = parties()
    may_end = threading.Event()
    step = pool.submit(trainer.use, "works", may_end)
    await_true(lambda: trainer.turns.held, "the trainer has its turn")
    request = pool.submit(sampler.use)
    await_true(lambda: not trainer.turns.held, "the sampler waits")
    sampler.turns.close()
    with pytest.raises(Unavailable, match="about to end"):
        request.result(_FOREVER_S)
    may_end.set()
    done(step)

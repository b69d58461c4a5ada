"""Old and new processes side by side on one Redis and one object folder: clients get what the new code alone gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import script
from tests.chaos.compare import differences
from tests.chaos.script import Transcript
from tests.contract.awaiting import await_true
from tests.models import tiny_qwen3
from tests.upgrade.fleet import Fleet, Process, fleet
from tests.upgrade.tree import FROM, exported

pytestmark = pytest.mark.timeout(1800)

# Clients, each with its own model. A round of each kind: see tests/chaos/script.py.
_SLOTS = range(1, 1 + int(os.environ.get("TINSMITH_UPGRADE_CLIENTS", "2")))
_ROUNDS = 4
_NEW = None


@pytest.fixture(scope="module")
def old() -> Path:
    return exported(FROM)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture
def mixed(tmp_path: Path, base: Path) -> Iterator[Fleet]:
    with fleet(tmp_path / "fleet", base) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[int, Transcript]:
    """Results of the new code alone, undisturbed."""
    with fleet(tmp_path_factory.mktemp("alone"), base) as alone:
        alone.api(_NEW)
        alone.trainer(_NEW)
        alone.sampler(_NEW)
        alone.await_up()
        return played(alone)


def played(fleet: Fleet) -> dict[int, Transcript]:
    with ThreadPoolExecutor(len(_SLOTS)) as pool:
        return dict(zip(_SLOTS, pool.map(lambda slot: play(fleet, slot), _SLOTS), strict=True))


def play(fleet: Fleet, slot: int) -> Transcript:
    return script.play(fleet, slot, _ROUNDS)


def check(fleet: Fleet, expected: dict[int, Transcript], found: dict[int, Transcript]) -> None:
    for slot in _SLOTS:
        assert differences(expected[slot], found[slot]) == []
    assert fleet.lost() == []


@contextmanager
def clients(fleet: Fleet, expected: dict[int, Transcript]) -> Iterator[Callable[[], int]]:
    """Clients that play again and again, until the end of the block.

    Yields the number of correct transcripts so far. Raises what any of them raised.
    """
    over, right = threading.Event(), [0]

    def play_on(slot: int) -> None:
        while not over.is_set():
            assert differences(expected[slot], play(fleet, slot)) == []
            right[0] += 1

    def plays() -> int:
        for client in playing:
            if client.done():
                client.result()
        return right[0]

    with ThreadPoolExecutor(len(_SLOTS)) as pool:
        playing: list[Future[Any]] = [pool.submit(play_on, slot) for slot in _SLOTS]
        try:
            yield plays
        finally:
            over.set()
        for client in playing:
            client.result()
    assert right[0] >= len(_SLOTS)
    assert fleet.lost() == []


def serves(process: Process, plays: Callable[[], int], calls: int = 10) -> None:
    """Returns when the process has ended so many more calls."""
    before = process.served
    await_true(lambda: plays() >= 0 and process.served >= before + calls, f"{process.name} ends calls")


def test_an_old_api_serves_clients_through_new_workers(mixed: Fleet, expected: dict[int, Transcript], old: Path):
    mixed.api(old)
    mixed.trainer(_NEW)
    mixed.sampler(_NEW)
    mixed.await_up()
    check(mixed, expected, played(mixed))


def test_a_new_api_serves_clients_through_old_workers(mixed: Fleet, expected: dict[int, Transcript], old: Path):
    mixed.api(_NEW)
    mixed.trainer(old)
    mixed.sampler(old)
    mixed.await_up()
    check(mixed, expected, played(mixed))


def test_a_model_moves_between_old_and_new_trainers_that_are_killed(
    mixed: Fleet, expected: dict[int, Transcript], old: Path
):
    mixed.api(_NEW)
    mixed.sampler(_NEW)
    take_over_from_each_other(mixed, expected, mixed.trainer, [_NEW, old])


def test_old_and_new_samplers_take_over_requests_from_each_other(
    mixed: Fleet, expected: dict[int, Transcript], old: Path
):
    mixed.api(_NEW)
    mixed.trainer(_NEW)
    take_over_from_each_other(mixed, expected, mixed.sampler, [_NEW, old])


def take_over_from_each_other(
    mixed: Fleet, expected: dict[int, Transcript], start: Callable[[Path | None], Process], trees: list[Path | None]
) -> None:
    """A worker of each tree: each is killed with unfinished work, which only the other can continue."""
    workers = [start(tree) for tree in trees]
    mixed.await_up()
    with clients(mixed, expected) as plays:
        for turn in (0, 1):
            killed = workers[turn]
            taken = mixed.kill_at_work(killed)
            await_true(
                lambda killed=killed, taken=taken: plays() >= 0 and not taken & mixed.taken_by(killed.name),
                f"what {killed.name} had in hand is taken over",
            )
            workers[turn] = start(trees[turn])
            mixed.await_up()


@pytest.mark.parametrize("back", [False, True], ids=["upgrade", "downgrade"])
def test_every_process_is_exchanged_while_clients_work(
    mixed: Fleet, expected: dict[int, Transcript], old: Path, back: bool
):
    before, after = (_NEW, old) if back else (old, _NEW)
    api, trainer, sampler = mixed.api(before), mixed.trainer(before), mixed.sampler(before)
    mixed.await_up()
    with clients(mixed, expected) as plays:
        serves(trainer, plays)
        newer = mixed.trainer(after), mixed.sampler(after)
        mixed.await_up()
        trainer.stop()
        sampler.stop()
        serves(newer[0], plays)
        api.stop()
        mixed.api(after)
        for process in newer:
            serves(process, plays)

"""Old and new processes side by side on one Redis and one object folder: clients get what the new code alone gives."""

from __future__ import annotations

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

# Clients, each with a model of its own. A round of each kind: see tests/chaos/script.py.
_SLOTS = (1, 2)
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
    """What the new code alone gives, undisturbed."""
    with fleet(tmp_path_factory.mktemp("alone"), base) as alone:
        alone.api(_NEW)
        alone.trainer(_NEW)
        alone.sampler(_NEW)
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
    """Clients that play over and over, until the end of the block; how many transcripts were right so far. Raises what
    any of them raised."""
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
    """Returns when it has ended so many more calls."""
    before = process.served
    await_true(lambda: plays() >= 0 and process.served >= before + calls, f"{process.name} ends calls")


def test_an_old_api_serves_clients_through_new_workers(mixed: Fleet, expected: dict[int, Transcript], old: Path):
    mixed.api(old)
    mixed.trainer(_NEW)
    mixed.sampler(_NEW)
    check(mixed, expected, played(mixed))


def test_a_new_api_serves_clients_through_old_workers(mixed: Fleet, expected: dict[int, Transcript], old: Path):
    mixed.api(_NEW)
    mixed.trainer(old)
    mixed.sampler(old)
    check(mixed, expected, played(mixed))


def test_models_move_between_old_and_new_trainers_that_are_killed(
    mixed: Fleet, expected: dict[int, Transcript], old: Path
):
    mixed.api(_NEW)
    mixed.sampler(_NEW)
    trees = (_NEW, old)
    trainers = [mixed.trainer(tree) for tree in trees]
    moved = []
    with clients(mixed, expected) as plays:
        for turn in (0, 1, 0, 1):
            serves(trainers[turn], plays)
            held = {model for model, owner in mixed.owners().items() if owner == trainers[turn].name}
            trainers[turn].kill()
            other = trainers[1 - turn]
            serves(other, plays)
            taken = {model for model, owner in mixed.owners().items() if owner == other.name}
            moved.append(len(held & taken))
            trainers[turn] = mixed.trainer(trees[turn])
    assert moved[0] + moved[2] > 0, "from new to old"
    assert moved[1] + moved[3] > 0, "from old to new"


def test_old_and_new_samplers_share_what_is_asked_and_take_over_from_each_other(
    mixed: Fleet, expected: dict[int, Transcript], old: Path
):
    mixed.api(_NEW)
    mixed.trainer(_NEW)
    trees = (_NEW, old)
    samplers = [mixed.sampler(tree) for tree in trees]
    with clients(mixed, expected) as plays:
        for turn in (0, 1):
            samplers[turn].kill()
            serves(samplers[1 - turn], plays, 3)
            samplers[turn] = mixed.sampler(trees[turn])
            serves(samplers[turn], plays, 1)


@pytest.mark.parametrize("back", [False, True], ids=["upgrade", "downgrade"])
def test_every_process_is_exchanged_while_clients_work(
    mixed: Fleet, expected: dict[int, Transcript], old: Path, back: bool
):
    before, after = (_NEW, old) if back else (old, _NEW)
    api, trainer, sampler = mixed.api(before), mixed.trainer(before), mixed.sampler(before)
    with clients(mixed, expected) as plays:
        serves(trainer, plays)
        newer = mixed.trainer(after)
        trainer.stop()
        serves(newer, plays)
        api.stop()
        mixed.api(after)
        serves(newer, plays)
        sampling = mixed.sampler(after)
        sampler.stop()
        serves(sampling, plays, 3)

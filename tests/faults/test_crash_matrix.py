"""R7: the process dies at every single call of a training run in turn, and the run ends as if it had not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from app.domain.ops import LoadWeights, SaveWeights
from app.errors import TinsmithError
from tests.faults.conftest import NewWorld
from tests.faults.injection import Call, Fault
from tests.faults.world import EVERY_STEP, Run, Service, World, backward, optim_step

# The full matrix takes minutes. The short form takes this many points, by a seed that a failure prints.
_ALL = bool(os.environ.get("TINSMITH_FAULTS_ALL"))
_SEED = int(os.environ.get("TINSMITH_FAULTS_SEED", "1"))
_AT_ONCE = 2
# A snapshot that is overtaken by another is not taken: on a busy machine not every run reaches every call.
_TRIES = 3
_LIMIT_S = 3600 if _ALL else 900

Train = Callable[[World, str, tuple[Fault, ...]], Service]


def train(world: World, name: str, faults: tuple[Fault, ...] = ()) -> Service:
    """Runs one Op of every kind, with a snapshot in between; its first worker has the faults."""
    run = world.run(name)
    # Every other run continues on another node: without the first worker's files on its disk.
    machines = (f"{name}-a", f"{name}-b") if name.endswith(tuple("02468")) else (f"{name}-a",)
    service = Service.on(run, *machines, faults=faults)
    _train_and_save(run, service)
    _load_and_end(run, service)
    return service


def take_over(world: World, name: str, faults: tuple[Fault, ...] = ()) -> Service:
    """The same run, but its first worker is killed, and the worker that restores the run elsewhere has the faults."""
    return _take_over(world, name, (f"{name}-a", f"{name}-b"), faults)


def take_over_here(world: World, name: str, faults: tuple[Fault, ...] = ()) -> Service:
    """The same run, but it is restored from the first worker's own disk."""
    return _take_over(world, name, (f"{name}-a",), faults)


def _take_over(world: World, name: str, machines: tuple[str, ...], faults: tuple[Fault, ...]) -> Service:
    run = world.run(name)
    service = Service.on(run, *machines)
    _train_and_save(run, service)
    service.run_to(run.admit(backward(5)))
    service.worker.kill()
    service.replace(faults)
    _load_and_end(run, service)
    return service


def _train_and_save(run: Run, service: Service) -> None:
    service.run_to(run.admit(backward(0), backward(1), optim_step()))
    service.run_to(run.admit(SaveWeights("weights", "kept"), backward(2), optim_step()))
    service.await_snapshot(run.last)
    service.run_to(run.admit(SaveWeights("sampler_weights", "sampler"), run.save_for_sampling(0), backward(3)))


def _load_and_end(run: Run, service: Service) -> None:
    load = LoadWeights(run.path("kept"), optimizer=True, prefix=run.prefix("kept"))
    service.run_to(run.admit(load))
    service.await_snapshot(run.last)
    service.run_to(run.admit(backward(4), run.save_for_sampling(1), optim_step(), SaveWeights("weights", "final")))
    service.await_snapshot(run.last - 1)
    service.await_uploads()


@pytest.mark.timeout(_LIMIT_S)
def test_a_worker_that_dies_at_any_call_changes_nothing(worlds: list[World]):
    assert _faulty(worlds, train, 40) == {}


@pytest.mark.timeout(_LIMIT_S)
@pytest.mark.parametrize("training", [take_over, take_over_here])
def test_a_successor_that_dies_at_any_call_changes_nothing(worlds: list[World], training: Train):
    assert _faulty(worlds, training, 12) == {}


@pytest.fixture
def worlds(new_world: NewWorld, valkey: str) -> list[World]:
    """One world for each concurrent run.

    In a shared world, a worker might take another run's model, which has no owner at first.
    """
    server, _, _ = valkey.rpartition("/")
    return [new_world(redis_url=f"{server}/{database}", **EVERY_STEP) for database in range(_AT_ONCE)]


def _faulty(worlds: list[World], training: Train, short: int) -> dict[Fault, str]:
    """Lists each fault after which something differs from the undisturbed run."""
    free: SimpleQueue[World] = SimpleQueue()
    for world in worlds:
        free.put(world)
    undisturbed = training(worlds[0], "undisturbed", ())
    calls = undisturbed.worker.calls()
    undisturbed.close()
    expected = undisturbed.run.state()
    undisturbed.run.check_objects()
    faults = _chosen(calls, short)
    print(f"seed {_SEED}: {len(faults)} deaths at {len(calls)} calls")

    def outcome(numbered: tuple[int, Fault]) -> str:
        number, fault = numbered
        world = free.get()
        try:
            for attempt in range(_TRIES):
                service = training(world, f"try{attempt}-run{number}", (fault,))
                service.close()
                if service.deaths:
                    break
        except (AssertionError, TinsmithError) as error:
            return f"the run did not end: {error!r}"
        finally:
            free.put(world)
        return _difference(service, expected)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = pool.map(outcome, enumerate(faults))
        return {fault: text for fault, text in zip(faults, outcomes, strict=True) if text}


def _chosen(calls: Sequence[Call], short: int) -> list[Fault]:
    """Points before and after each call; in the short form `short` of them."""
    faults = [Fault(call.name, when, nth=call.nth) for call in calls for when in ("before", "after")]
    return faults if _ALL else random.Random(_SEED).sample(faults, short)


def _difference(service: Service, expected: object) -> str:
    if not service.deaths:
        return "the worker did not die there"
    try:
        service.run.check_objects()
    except (AssertionError, TinsmithError) as error:
        return f"something half-written is visible: {error!r}"
    found = service.run.state()
    return "" if found == expected else f"{found} is not {expected}"

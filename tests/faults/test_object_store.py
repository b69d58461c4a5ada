"""R9: the object store is away, slow, or breaks off in the middle. Training goes on; stored objects are complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.domain.ops import LoadWeights, SaveWeights
from app.settings import StoreSettings
from tests.faults.conftest import NewWorld
from tests.faults.proxy import Proxy
from tests.faults.world import EVERY_STEP, Run, Service, World, backward, differences, optim_step

SEED = 3
TRIES = 4
ROUNDS = 12
CUT_SHARE = 1.0
CUT_WITHIN = 300_000  # bytes; a checkpoint has half as many


@pytest.fixture
def proxy(server: StoreSettings) -> Iterator[Proxy]:
    with Proxy(server.url, CUT_WITHIN, SEED) as proxy:
        yield proxy


@pytest.fixture
def world(new_world: NewWorld, server: StoreSettings, proxy: Proxy) -> World:
    """Workers reach the store through the proxy, the test reaches it directly."""
    return new_world(store=server.model_dump(), store_url=proxy.url, **EVERY_STEP)


def test_training_goes_on_without_the_store_and_a_save_waits_for_it(world: World, proxy: Proxy):
    run = world.run("run")
    service = Service.on(run, "a")
    service.run_to(train(run, 0))
    service.await_snapshot(run.last)
    durable = run.head()["snapshot"]
    proxy.refuse()
    for seed in (1, 2, 3):
        service.run_to(train(run, seed))
    assert service.turned_away == 0
    save = run.admit(SaveWeights("weights", "kept"))
    assert [service.try_to(save)[0] for _ in range(TRIES)] == ["not now"] * TRIES
    assert run.head()["snapshot"] == durable
    proxy.go_on()
    service.run_to(save)
    end(run, service)
    assert run.state() == undisturbed(world, range(4))
    run.check_objects()


def test_a_save_that_is_put_off_counts_no_attempt_whatever_becomes_of_its_worker(world: World, proxy: Proxy):
    run = world.run("run")
    service = Service.on(run, "a")
    service.run_to(train(run, 0))
    save = run.admit(SaveWeights("weights", "kept"))
    proxy.refuse()
    for _ in range(TRIES):
        assert service.try_to(save)[0] == "not now"
        service.worker.kill()
        service.replace()
    proxy.go_on()
    service.run_to(save)
    end(run, service)
    assert run.state() == undisturbed(world, range(1))


def test_training_does_not_wait_for_a_store_that_hangs(world: World, proxy: Proxy):
    run = world.run("run")
    service = Service.on(run, "a")
    service.run_to(train(run, 0))
    proxy.stall()
    for seed in (1, 2, 3):
        service.run_to(train(run, seed))
    assert int(run.head()["snapshot_seq"]) < run.last, "nothing could be stored meanwhile"
    proxy.go_on()
    service.await_snapshot(run.last)
    service.run_to(run.admit(SaveWeights("weights", "kept")))
    end(run, service)
    assert run.state() == undisturbed(world, range(4))


def test_connections_that_break_off_leave_no_half_of_anything(world: World, proxy: Proxy):
    run = world.run("run")
    service = Service.on(run, "a", "b")
    proxy.cut_share = CUT_SHARE
    for seed in range(ROUNDS):
        train(run, seed)
        service.run_to(run.admit(SaveWeights("weights", f"round-{seed}")))
        if seed % 3 == 2:
            service.worker.kill()
            service.replace()  # it reads its snapshot back over the same network
    proxy.cut_share = 0.0
    service.run_to(run.admit(SaveWeights("weights", "kept")))
    end(run, service)
    print(f"seed {SEED}: {proxy.cut} connections cut, {service.turned_away} dispatches in vain")
    assert proxy.cut >= ROUNDS
    calm = world.run("undisturbed")
    reference = Service.on(calm, "c")
    for seed in range(ROUNDS):
        train(calm, seed)
        reference.run_to(calm.admit(SaveWeights("weights", f"round-{seed}")))
    reference.run_to(calm.admit(SaveWeights("weights", "kept")))
    end(calm, reference)
    assert differences(run.state(), calm.state()) == {}
    assert run.state() == calm.state()
    run.check_objects()


def train(run: Run, seed: int) -> int:
    return run.admit(backward(seed), optim_step())


def end(run: Run, service: Service) -> None:
    """Loads the kept checkpoint, and saves the state that follows from it."""
    service.run_to(run.admit(LoadWeights(run.path("kept"), optimizer=True, prefix=run.prefix("kept"))))
    train(run, 99)
    service.run_to(run.admit(SaveWeights("weights", "final")))


def undisturbed(world: World, seeds: range) -> object:
    run = world.run("undisturbed")
    service = Service.on(run, "reference")
    for seed in seeds:
        train(run, seed)
    service.run_to(run.admit(SaveWeights("weights", "kept")))
    end(run, service)
    return run.state()

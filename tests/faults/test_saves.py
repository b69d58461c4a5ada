"""A save hangs in the object store while the next steps run. In every case nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from app.domain.ops import LoadWeights, SaveWeights
from app.settings import StoreSettings
from app.stores.redis import keys
from tests.faults.conftest import NewWorld
from tests.faults.proxy import Proxy
from tests.faults.world import EVERY_STEP, Run, Service, World, await_true, backward, optim_step


@pytest.fixture
def proxy(server: StoreSettings) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def world(new_world: NewWorld, server: StoreSettings, proxy: Proxy) -> World:
    """Workers reach the store through the proxy, the test reaches it directly."""
    return new_world(store=server.model_dump(), store_url=proxy.url, **EVERY_STEP)


def begin(run: Run) -> int:
    return run.admit(backward(0), optim_step())


def save_and_go_on(run: Run) -> int:
    return run.admit(SaveWeights("weights", "kept"), backward(1), optim_step(), backward(2), optim_step())


def end(run: Run, service: Service) -> None:
    """Loads the kept checkpoint, and saves the state that follows from it."""
    load = LoadWeights(run.path("kept"), optimizer=True, prefix=run.prefix("kept"))
    service.run_to(run.admit(load, backward(3), optim_step(), SaveWeights("weights", "final")))


def undisturbed(world: World) -> object:
    run = world.run("undisturbed")
    service = Service.on(run, "reference")
    begin(run)
    service.run_to(save_and_go_on(run))
    end(run, service)
    return run.state()


def in_mid_save(run: Run, service: Service, proxy: Proxy) -> int:
    """Runs until the last of four Ops has begun beside a save that hangs. Returns the save's seq."""
    save = begin(run) + 1
    service.run_to(save - 1)
    service.await_snapshot(save - 1)
    proxy.stall()
    last = save_and_go_on(run)
    run.send(service.worker, save)
    await_true(lambda: run.world.client.hget(keys.op(run.request_id(last)), "runner"), "the last has begun")
    assert run.head()["applied"] == str(save - 1), "their commits wait for the save's"
    return save


def attempts(run: Run, save: int) -> list[int]:
    """Attempts, as far as the journal still holds them."""
    found = (run.world.client.hget(keys.op(run.request_id(seq)), "attempts") for seq in range(save, run.last + 1))
    return [int(count) for count in found if count is not None]


def put_back(run: Run, save: int) -> bool:
    """True if the journal holds every Op from the save on, without a runner and without an attempt."""
    found = (
        run.world.client.hmget(keys.op(run.request_id(seq)), "attempts", "runner") for seq in range(save, run.last + 1)
    )
    return all(each == [b"0", None] for each in found)


def dies(run: Run, service: Service, proxy: Proxy) -> None:
    service.worker.kill()
    proxy.go_on()
    service.replace()


def ends_in_order(run: Run, service: Service, proxy: Proxy) -> None:
    """Ends in order. Its connections break as it ends."""
    proxy.refuse()
    assert service.worker.answer()[0] == "not now"
    service.worker.close()
    proxy.go_on()
    service.start()


def loses_the_store(run: Run, service: Service, proxy: Proxy) -> None:
    proxy.refuse()
    assert service.worker.answer()[0] == "not now"
    proxy.go_on()


def loses_its_lease(run: Run, service: Service, proxy: Proxy) -> None:
    """Loses its lease. Its unfinished upload arrives when the successor is done."""
    run.lapse()
    successor = Service.on(run, "successor")
    proxy.go_on()
    successor.run_to(run.last)
    service.worker.answer()
    service.worker = successor.worker


@pytest.mark.parametrize(
    ("what", "nodes"),
    [(dies, "a"), (dies, "ab"), (ends_in_order, "ab"), (loses_the_store, "a"), (loses_its_lease, "a")],
)
def test_whatever_happens_in_mid_save_the_run_ends_as_if_it_had_not(
    world: World, proxy: Proxy, what: Callable[[Run, Service, Proxy], None], nodes: str
):
    run = world.run("run")
    service = Service.on(run, *nodes)
    save = in_mid_save(run, service, proxy)
    what(run, service, proxy)
    if what in (ends_in_order, loses_the_store):
        await_true(lambda: put_back(run, save), "its worker lived, and the calls are not put back")
    service.run_to(run.last)
    assert all(count <= 1 for count in attempts(run, save)), "one death, one attempt"
    end(run, service)
    assert run.state() == undisturbed(world)
    run.check_objects()

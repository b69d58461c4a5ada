"""The object store hangs while weights are sampled that it does not have yet; in every case it gets them later."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from app.settings import StoreSettings
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


def save_for_sampling_and_go_on(run: Run) -> int:
    run.admit(run.save_for_sampling(0), backward(1), optim_step(), run.save_for_sampling(1))
    return run.admit(backward(2), optim_step())


def undisturbed(world: World) -> object:
    run = world.run("undisturbed")
    service = Service.on(run, "reference")
    run.admit(backward(0), optim_step())
    service.run_to(save_for_sampling_and_go_on(run))
    service.await_uploads()
    return run.state()


def dies(run: Run, service: Service, proxy: Proxy) -> None:
    service.worker.kill()
    service.deaths += 1
    proxy.go_on()
    service.replace()


def dies_with_its_memory(run: Run, service: Service, proxy: Proxy) -> None:
    """Simulates a restart of the machine: memory is lost, files on the disk remain."""
    service.worker.kill()
    service.deaths += 1
    shutil.rmtree(run.world.folder / service.worker.node / "handover")
    proxy.go_on()
    service.replace()


def ends_in_order(run: Run, service: Service, proxy: Proxy) -> None:
    """Ends in order. Uploads that do not finish in time are left to the next worker."""
    proxy.refuse()
    service.worker.close()
    proxy.go_on()
    service.start()
    service.deaths += 1  # no dispatch reaches that one


def loses_the_store(run: Run, service: Service, proxy: Proxy) -> None:
    proxy.refuse()
    proxy.go_on()


def loses_its_lease(run: Run, service: Service, proxy: Proxy) -> None:
    """Loses its lease. Its unfinished upload arrives while the successor uploads the same weights again."""
    run.lapse()
    successor = Service.on(run, "successor")
    successor.deaths += 1
    proxy.go_on()
    successor.await_uploads()
    service.worker = successor.worker


@pytest.mark.parametrize(
    ("what", "nodes"),
    [
        (dies, "a"),
        (dies, "ab"),
        (dies_with_its_memory, "a"),
        (ends_in_order, "ab"),
        (loses_the_store, "a"),
        (loses_its_lease, "a"),
    ],
)
def test_whatever_happens_before_the_upload_the_store_has_the_same_weights_in_the_end(
    world: World, proxy: Proxy, what: Callable[[Run, Service, Proxy], None], nodes: str
):
    run = world.run("run")
    service = Service.on(run, *nodes)
    service.run_to(run.admit(backward(0), optim_step()))
    service.await_snapshot(run.last)
    proxy.stall()
    service.run_to(save_for_sampling_and_go_on(run))
    await_true(lambda: len(run.waiting_uploads()) == 2, "both saves are committed, and neither is uploaded")
    assert int(run.head()["snapshot_seq"]) == 2, "the journal keeps what makes them again"
    what(run, service, proxy)
    service.await_uploads()
    assert run.state() == undisturbed(world)
    run.check_objects()
    service.run_to(run.admit(backward(3), optim_step()))
    run.await_snapshot(run.last, service.worker)

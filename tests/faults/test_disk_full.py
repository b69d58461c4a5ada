"""R10: a full disk of the worker costs time, never a model, a snapshot or a checkpoint."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from app.domain.ops import SaveWeights
from tests.faults.conftest import NewWorld
from tests.faults.worker_process import WorkerProcess
from tests.faults.world import EVERY_STEP, Service, backward, optim_step

# Less than an adapter's file, more than nothing: the write fails in the middle.
_ROOM = 4096
_TRIES = 6


@contextmanager
def full_disk(worker: WorkerProcess) -> Iterator[None]:
    """No file of the worker grows beyond _ROOM bytes. Python ignores SIGXFSZ, so the write fails as on a full disk."""
    old = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (_ROOM, old[1]))
    yield
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, old)


def test_a_full_disk_at_a_save_puts_it_off_until_there_is_room(new_world: NewWorld):
    world = new_world()
    run = world.run("run")
    service = Service.on(run, "a")
    service.run_to(run.admit(backward(0), optim_step()))
    save = run.admit(SaveWeights("weights", "kept"))
    with full_disk(service.worker):
        assert [service.try_to(save)[0] for _ in range(_TRIES)] == ["not now"] * _TRIES
    run.check_objects()
    service.run_to(run.admit(backward(1), optim_step(), SaveWeights("weights", "final")))
    assert service.deaths == 0, "the model lived through it"
    service.close()
    calm = world.run("undisturbed")  # only now, or the first worker may take the model, which has no owner yet
    Service.on(calm, "b").run_to(
        calm.admit(backward(0), optim_step(), SaveWeights("weights", "kept"), backward(1), optim_step())
        and calm.admit(SaveWeights("weights", "final"))
    )
    assert run.state() == calm.state()


def test_a_full_disk_at_a_snapshot_leaves_the_old_one_and_the_run_goes_on(new_world: NewWorld):
    world = new_world(**EVERY_STEP)
    run = world.run("run")
    service = Service.on(run, "a", "b")
    service.run_to(run.admit(backward(0), optim_step()))
    run.await_snapshot(run.last, service.worker)
    old = run.head()["snapshot"]
    with full_disk(service.worker):
        service.run_to(run.admit(backward(1), optim_step(), backward(2), optim_step()))
        assert service.turned_away == 0, "training needs no disk"
        assert run.head()["snapshot"] == old
        assert run.files(old)
    service.run_to(run.admit(backward(3), optim_step()))
    run.await_snapshot(run.last, service.worker)
    service.worker.kill()
    service.replace()
    service.run_to(run.admit(SaveWeights("weights", "final")))
    service.close()
    calm = world.run("undisturbed")
    reference = Service.on(calm, "c")
    for seed in range(4):
        reference.run_to(calm.admit(backward(seed), optim_step()))
    reference.run_to(calm.admit(SaveWeights("weights", "final")))
    assert run.state() == calm.state()
    run.check_objects()

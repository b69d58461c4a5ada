"""R4: a worker that was paused past its lease, anywhere in its work, changes nothing when it resumes.

Its successor has taken over and made progress by then. The zombie serves again later, with right results.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.domain.ops import LoadWeights, SaveWeights
from tests.faults.conftest import NewWorld
from tests.faults.injection import Fault
from tests.faults.proxy import Proxy
from tests.faults.worker_process import WorkerProcess
from tests.faults.world import EVERY_STEP, Run, Service, World, await_true, backward, optim_step

# The first worker's lease. The others' is long, because only the first worker is to lose its lease.
SHORT = {"lease_s": 2.0, **EVERY_STEP}
_RINGS, _PAUSE_S = 200, 0.05
TOKENS = 12
FORWARD_BACKWARD = f"backend.apply ForwardBackward-{2 * TOKENS + 1}"
POINTS = {
    "before the run": Fault("oplog.next 4", "after", "stray"),
    "running": Fault(FORWARD_BACKWARD, "before", "stray"),
    "after the run": Fault(FORWARD_BACKWARD, "after", "stop"),
    "before the commit": Fault("oplog.commit 4", "before", "stop"),
    "in the commit, its answer unread": Fault("oplog.commit 4", "after", "stop"),
    "in a checkpoint's upload": Fault("store.put_new */weights/kept/*/adapter_model.safetensors", "after", "stop"),
    "before a checkpoint's manifest": Fault("store.put_new */weights/kept/*/manifest.json", "before", "stop"),
    "before a checkpoint's commit": Fault("oplog.commit 3", "before", "stop"),
    "in a snapshot's upload": Fault("store.put_new */snapshots/6/*/adapter_model.safetensors", "after", "stop"),
    "before a snapshot's pointer": Fault("oplog.set_snapshot 6 *", "before", "stop"),
    "in a snapshot's pointer, its answer unread": Fault("oplog.set_snapshot 6 *", "after", "stop"),
}


class Relay:
    """A run whose first worker gets dispatches until it is stopped; its successor gets them from then on."""

    def __init__(self, run: Run, zombie: WorkerProcess, on_stop: Callable[[], None] = lambda: None) -> None:
        self.run, self.zombie, self._on_stop = run, zombie, on_stop
        self.successor: Service | None = None
        self.owed = False

    def run_to(self, seq: int) -> None:
        if self.successor is None:
            if self._run_first_to(seq):
                return
            self.owed = True
            self.take_over()
        assert self.successor is not None
        self.successor.run_to(seq)

    def _run_first_to(self, seq: int) -> bool:
        """Returns False when the worker is stopped.

        If the worker gets no CPU, its lease expires as well, and it is dispatched again.
        """
        for _ in range(_RINGS):
            self.run.send(self.zombie, seq)
            await_true(lambda: self.zombie.answered or self.zombie.stopped, "an answer, or a stop")
            if not self.zombie.answered:
                return False
            what, why = self.zombie.answer()
            if what == "done":
                return True
            assert what in ("not now", "error"), why
            time.sleep(_PAUSE_S)
        raise AssertionError(f"seq {seq} did not end; last: {what}: {why}")

    def take_over(self) -> Service:
        """Starts the successor, which gets the model once the lease has expired by itself."""
        if self.successor is None:
            await_true(lambda: self.zombie.stopped, "the first worker stands still")
            self._on_stop()
            self.successor = Service.on(self.run, "successor")
        return self.successor


@pytest.mark.parametrize("point", POINTS)
def test_a_zombie_changes_nothing(new_world: NewWorld, point: str):
    zombie = new_world(**SHORT).worker("zombie", POINTS[point])
    relay = Relay(new_world(**EVERY_STEP).run("run"), zombie)
    check_nothing_changes(relay, lambda: zombie.signal(signal.SIGCONT))


def test_a_commit_that_the_network_kept_past_the_lease_changes_nothing(new_world: NewWorld, valkey: str):
    with Proxy(valkey) as proxy:
        world, behind = new_world(**EVERY_STEP), new_world(redis_url=proxy.url, **SHORT)
        zombie = behind.worker("zombie", Fault("oplog.commit 4", "before", "stop"))

        def send_and_keep() -> None:
            proxy.stall()
            zombie.signal(signal.SIGCONT)

        check_nothing_changes(Relay(world.run("run"), zombie, send_and_keep), proxy.go_on)


def begin(run: Run, run_to: Callable[[int], None]) -> None:
    """Journals seq 1 to 6, which the points name."""
    run_to(run.admit(backward(0), optim_step(), SaveWeights("weights", "kept")))
    run_to(run.admit(backward(1, TOKENS), optim_step()))
    run_to(run.admit(LoadWeights(run.path("kept"), optimizer=True, prefix=run.prefix("kept"))))


def go_on(run: Run, run_to: Callable[[int], None]) -> None:
    run_to(run.admit(backward(2), optim_step()))


def end(run: Run, run_to: Callable[[int], None]) -> None:
    run_to(run.admit(backward(3), optim_step(), SaveWeights("weights", "final")))


def check_nothing_changes(relay: Relay, wake: Callable[[], None]) -> None:
    run, zombie = relay.run, relay.zombie
    begin(run, relay.run_to)
    successor = relay.take_over()
    go_on(run, successor.run_to)
    run.await_snapshot(run.last, successor.worker)
    before = visible(run)
    assert before["head"]["worker"].startswith("successor/"), "the successor took over"
    wake()
    if relay.owed:
        assert zombie.answer()[0] in ("not now", "error", "done")
    await_quiet(zombie)
    assert visible(run) == before
    successor.close()
    again = Service(run, itertools.repeat(zombie.node))
    again.worker = zombie
    end(run, again.run_to)
    assert again.deaths == 0, "the zombie serves again"
    assert run.state() == undisturbed(run.world)
    run.check_objects()


def undisturbed(world: World) -> dict[str, Any]:
    run = world.run("undisturbed")
    service = Service.on(run, "reference")
    for stage in (begin, go_on, end):
        stage(run, service.run_to)
    service.close()
    return run.state()


def visible(run: Run) -> dict[str, Any]:
    """Everything visible of the run, the files of its snapshot included."""
    head = run.head()
    return {"head": head, "snapshot": run.files(head["snapshot"]) if head["snapshot"] else {}, **run.state()}


def await_quiet(worker: WorkerProcess) -> None:
    """Waits until the worker's unfinished work, in any thread, is over."""
    seen = -1
    while seen != (seen := len(worker.calls())):
        time.sleep(0.3)

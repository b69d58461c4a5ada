"""R15: an Op that kills its worker every time is given up after three tries, and delays no other Op."""

from __future__ import annotations

import itertools

import pytest

from app.domain.ops import SaveWeights
from app.stores.redis import keys
from tests.faults.conftest import NewWorld
from tests.faults.injection import Fault
from tests.faults.world import Run, Service, backward, optim_step

TOKENS = 31
POISON = Fault(f"backend.apply ForwardBackward-{2 * TOKENS + 1}", "before", nth=0)
TRIES = 3


class Poisoned(Service):
    """A world where every worker dies of the poison."""

    def start(self, faults: tuple[Fault, ...] = ()) -> None:
        super().start((POISON, *faults))


@pytest.mark.parametrize("nodes", [("a",), ("a", "b")], ids=["one machine", "two machines"])
def test_an_op_that_kills_its_worker_is_given_up_after_three_tries(new_world: NewWorld, nodes: tuple[str, ...]):
    world = new_world(lease_s=3.0)
    run = world.run("run")
    service = Poisoned(run, itertools.cycle(nodes))
    service.start()
    service.run_to(run.admit(backward(0)))
    poison = run.admit(backward(1, TOKENS))
    step = run.admit(optim_step())
    service.run_to(step)
    assert service.deaths == TRIES
    assert run.error(poison)["category"] == "server"
    assert "gradient it needs is missing" in run.error(step)["error"], "no step on a part of its gradients"
    assert end(service) == end(Service.on(world.run("undisturbed"), "c"))
    assert service.deaths == TRIES, "what comes behind it runs, and no successor runs it again"


def test_other_models_of_the_worker_go_on(new_world: NewWorld):
    """Other models are promised every result, no attempt at any of their Ops, one restart at most.

    That one restart cannot be avoided. An Op without an attempt runs under whatever dispatch is being handled;
    otherwise a model with few calls would wait for all calls of a model with many. And nothing identifies a first
    attempt that will kill. Where every Op has its own pass, the other model's next Op has not begun by then. From its
    second attempt on, the poison runs under its own dispatches alone.
    """
    world = new_world()
    poisoned, other = world.run("run"), world.run("other")
    sick = Poisoned(poisoned, itertools.repeat("a"))
    sick.start()
    sick.run_to(poisoned.admit(backward(0)))
    poisoned.admit(backward(1, TOKENS))
    deaths = []
    for seed in range(TRIES + 2):
        well = Poisoned(other, itertools.repeat("a"))
        well.worker = sick.worker
        well.run_to(other.admit(backward(seed), optim_step()))
        sick.worker = well.worker
        deaths.append(well.deaths)
        sick.try_to(poisoned.last)
    assert deaths == [1] + [0] * (len(deaths) - 1), "its first try had its turn, longest waited for, and no other"
    assert sick.deaths == TRIES - 1
    assert [attempts(other, seq) for seq in range(other.last + 1)] == [0] * (other.last + 1)
    assert poisoned.error(poisoned.last)["category"] == "server"
    assert [other.result(seq)[:4] for seq in range(other.last + 1)] == [b"done"] * (other.last + 1)


def attempts(run: Run, seq: int) -> int:
    return int(run.world.client.hget(keys.op(run.request_id(seq)), "attempts"))


def end(service: Service) -> dict[str, str]:
    """Files of the model after one more step."""
    run: Run = service.run
    service.run_to(run.admit(backward(5), optim_step(), SaveWeights("weights", "final")))
    service.worker.kill()
    return run.files(run.prefix("final"))

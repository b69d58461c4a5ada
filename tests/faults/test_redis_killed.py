"""R3: the state server is killed in the middle of training and restarted: no acknowledged write is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from app.domain.ops import SaveWeights
from tests.faults.conftest import NewWorld
from tests.faults.servers import Valkey
from tests.faults.world import Run, Service, backward, optim_step

STEPS = 20
KILLS, MOST_KILLS = 10, 200
SEED = 5


def test_no_acknowledged_op_is_lost_with_the_state_server(new_world: NewWorld, memory: Path):
    with Valkey(memory / "killed") as valkey:
        world = new_world(redis_url=valkey.url, lease_s=3.0)
        run = world.run("run")
        service = Service.on(run, "a")
        service.run_to(0)
        over = threading.Event()
        killer = threading.Thread(target=kill_and_restart, args=(valkey, over, lambda: service.turned_away > 0))
        killer.start()
        kills_seen = train(run, service, over)
        killer.join()
        print(f"seed {SEED}: {service.turned_away} dispatches in vain")
        assert kills_seen, "the run was longer than the kills"
        assert service.turned_away >= 1, "some kill hit a call of the worker"
        service.run_to(run.admit(SaveWeights("weights", "final")))
        service.close()
        calm = world.run("undisturbed")  # only now, or the first worker may take the model, which has no owner yet
        reference = Service.on(calm, "b")
        train(calm, reference, over, steps=(run.last - 1) // 3)
        reference.run_to(calm.admit(SaveWeights("weights", "final")))
        assert run.state() == calm.state()
        assert service.deaths == 0, "an outage is no crash of the worker"


def train(run: Run, service: Service, over: threading.Event, steps: int = 0) -> bool:
    """Runs `steps` steps, or at least STEPS and until the kills are over. Returns True when they are over."""
    seed = 0
    while seed < (steps or STEPS) or (not steps and not over.is_set()):
        service.run_to(run.admit(backward(seed), backward(seed + 1), optim_step()))
        seed += 1
    return over.is_set()


def kill_and_restart(valkey: Valkey, over: threading.Event, hit: Callable[[], bool]) -> None:
    """Kills and restarts the server KILLS times, and then until one kill hits something, at most MOST_KILLS times."""
    dice = random.Random(SEED)
    for number in range(MOST_KILLS):
        if number >= KILLS and hit():
            break
        time.sleep(dice.uniform(0.05, 0.5))
        valkey.kill()
        time.sleep(dice.uniform(0.0, 0.3))
        valkey.start()
    over.set()

"""The seeded killer: which process dies, in which order, and how soon after the last kill.

The seed fixes the plan. The machine decides at which point of an Op a signal arrives.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from app.stores.redis.client import connect
from tests.chaos.observer import Observer, Running, Stalled, await_true, writes
from tests.chaos.patience import patiently
from tests.contract.stack import Stack

OWNER, IDLE, ZOMBIE, RANK, SAMPLER = "owner", "idle", "zombie", "rank", "sampler"
KILL_API, KILL_STATE, KILL_BROKER, FLUSH = "api", "state", "broker", "flush"

# An Op that crashes three workers is given up by design: we stop at two. `attempts` counts the earlier crashes.
_CRASHES_OF_AN_OP = 2
# Ops applied between two kills; with 0, two kills coincide.
_PAUSES = (0, 2, 5, 10)
# Longest delay into an Op: the median Op takes about as long.
_INTO_AN_OP_S = 0.1
# A zombie stopped with its commit already sent has no commit left to be refused. Then another zombie is made.
_ZOMBIES = 5
_REFUSED_WITHIN_S = 10.0


@dataclass
class Killer:
    """Injects the planned faults.

    `dose`: how often each fault is to happen. `changes`: how many changes of owner they are to cause at least. `done`
    is the share of the dose that has happened, 0 to 1. Two faults are at least `every_s` seconds apart.
    """

    stack: Stack
    observer: Observer
    seed: int
    dose: Mapping[str, int]
    changes: int
    note: Callable[[str], None]
    every_s: float = 0.0
    dealt: Counter[str] = field(default_factory=Counter)
    done: float = 0.0
    _dead: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Runs the whole plan. Raises Stalled when the stack makes no progress in between."""
        rng = random.Random(self.seed)
        goal = self.observer.heads().changes + self.changes
        plan = [name for name, count in sorted(self.dose.items()) for _ in range(count)]
        rng.shuffle(plan)
        blows: Mapping[str, Callable[[random.Random], Any]] = {
            OWNER: self._kill_owner,
            IDLE: self._kill_idle,
            ZOMBIE: self._zombie,
            RANK: self._kill_rank,
            SAMPLER: lambda _: self._kill("sampler-0"),
            KILL_API: self._kill_api,
            KILL_STATE: lambda _: self._kill("valkey"),
            KILL_BROKER: lambda _: self._kill("broker"),
            FLUSH: self._flush,
        }
        for number, name in enumerate(plan, 1):
            next_at = time.monotonic() + self.every_s
            self._progress(rng.choice(_PAUSES))
            said = blows[name](rng)
            self.dealt[name] += 1
            self.note(f"{number}/{len(plan)} {name}: {said}")
            self.done = number / len(plan)
            time.sleep(max(0.0, next_at - time.monotonic()))
        self._kill_further_owners(rng, goal)

    def _progress(self, ops: int) -> None:
        before = self.observer.heads()
        await_true(f"{ops} more Ops applied", lambda: self.observer.heads().applied_since(before) >= ops)

    def _kill_owner(self, rng: random.Random) -> str:
        op, process = self._seized(rng)
        process.kill()
        self._mark_dead(process, op.node)
        return _where(op)

    def _kill_further_owners(self, rng: random.Random, goal: int) -> None:
        """Kills owners until all models together have had `goal` changes of owner: a killed trainer owned one model or
        several, as the machine decides."""
        while OWNER in self.dose and self.observer.heads().changes < goal:
            op, process = self._seized(rng)
            epoch = self._epoch(op)
            process.kill()
            self._mark_dead(process, op.node)
            await_true(f"a new owner of {op.model_id}", lambda op=op, epoch=epoch: self._epoch(op) > epoch)
            self.dealt[OWNER] += 1
            self.note(f"further {OWNER}: {_where(op)}")

    def _epoch(self, op: Running) -> int:
        return self.observer.heads().models[op.model_id][0]

    def _kill_rank(self, rng: random.Random) -> str:
        """Kills any rank of a group whose rank 0 is in the middle of an Op."""
        op, process = self._seized(rng, spare=0)
        ranks = self.observer.ranks(op.node)
        victim = rng.randrange(len(ranks))
        ranks[victim].kill()
        if victim:
            process.resume()
        self._mark_dead(process, op.node)
        return f"rank {victim} of {_where(op)}"

    def _zombie(self, rng: random.Random) -> str:
        """Stops a trainer in an Op, and resumes it after another worker has committed that Op.

        Repeats this until one commit was refused.
        """
        for _ in range(_ZOMBIES):
            op, process = self._seized(rng)
            logged = self.observer.log(op.node).stat().st_size
            try:
                await_true(
                    f"{op.model_id}:{op.seq} applied by another trainer",
                    lambda op=op: self.observer.heads().models[op.model_id][1] >= op.seq,
                )
            finally:
                process.resume()
            if self._refused(op.node, logged):
                return _where(op)
        return f"{_where(op)}, and was not refused"

    def _refused(self, node: str, since: int) -> bool:
        with suppress(Stalled):
            return await_true(
                "a refused commit", lambda: self.observer.refused_commits(node, since) > 0, _REFUSED_WITHIN_S
            )
        return False

    def _seized(self, rng: random.Random, spare: int = 1) -> tuple[Running, psutil.Process]:
        """Stops a trainer in the middle of an Op, with `spare` other trainers up, and returns it."""
        return await_true("an Op to be run where another trainer is up", lambda: self._seize(rng, spare))

    def _seize(self, rng: random.Random, spare: int) -> tuple[Running, psutil.Process] | None:
        trainers = self.observer.trainers()
        spared = self._spared()
        ops = [op for op in self._live() if op.node in trainers and op.node not in spared]
        if len(trainers) <= spare or not ops:
            return None
        op = rng.choice(ops)
        time.sleep(rng.uniform(0, _INTO_AN_OP_S))
        process = trainers[op.node]
        if not stop_if_alive(process):
            return None
        if op in self._live() and op.node not in self._spared():
            return op, process
        process.resume()
        return None

    def _spared(self) -> set[str]:
        """Nodes that began an Op that must not crash once more. Most run it, alone or in a shared pass; others lost its
        model in an outage."""
        begun = (op for op in self.observer.begun() if op.worker not in self._dead)
        return {op.node for op in begun if op.attempts >= _CRASHES_OF_AN_OP}

    def _kill_idle(self, rng: random.Random) -> str:
        node, process = await_true("an idle trainer beside another one", lambda: self._idle(rng))
        process.kill()
        self._mark_dead(process, node)
        return node

    def _idle(self, rng: random.Random) -> tuple[str, psutil.Process] | None:
        trainers = self.observer.trainers()
        busy = {op.node for op in self._live()} | self._spared()
        idle = sorted(trainers.keys() - busy)
        if len(trainers) < 2 or not idle:
            return None
        node = rng.choice(idle)
        process = trainers[node]
        if not stop_if_alive(process):
            return None
        if node in self._spared() or any(op.node == node for op in self._live()):
            process.resume()
            return None
        return node, process

    def _live(self) -> list[Running]:
        """Ops run by live workers: a dead worker's Op stays in Redis until another worker takes it."""
        return [op for op in self.observer.running() if op.worker not in self._dead]

    def _mark_dead(self, process: psutil.Process, node: str) -> None:
        """Marks a killed trainer's worker as dead. Waits until its process ends: until then it is found, and would
        count as idle."""
        self._dead |= {worker for worker in self.observer.holders() if worker.partition("@")[0] == node}
        self._await_end(process, node)

    def _await_end(self, process: psutil.Process, name: str) -> None:
        await_true(f"{name} to end", lambda: not writes(process, self.observer.log(name)))

    def _kill_api(self, rng: random.Random) -> str:
        """Kills gunicorn's master, or the process that answers."""
        process = rng.choice(await_true("the API's two processes", lambda: self._two("api")))
        process.kill()
        self._await_end(process, "api")
        return f"pid {process.pid}"

    def _two(self, name: str) -> list[psutil.Process]:
        found = self.observer.processes(name)
        return found if len(found) == 2 else []

    def _kill(self, name: str) -> str:
        process = await_true(f"{name} to run", lambda: self.observer.processes(name))[0]
        process.kill()
        self._await_end(process, name)
        return f"pid {process.pid}"

    def _flush(self, _: random.Random) -> str:
        with connect(self.stack.settings().broker_url) as broker:
            patiently(broker.flushall)
        return "every message lost"


def stop_if_alive(process: psutil.Process) -> bool:
    """Stops a process. Returns False if it has ended: one that was killed is still found for a moment."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        return True
    return False


def _where(op: Running) -> str:
    return f"{op.node} in {op.kind} {op.model_id}:{op.seq}, after {op.attempts} crashes"

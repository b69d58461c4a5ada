"""Cost of snapshots per step: the same steps on two stacks in alternation.

One stack has the default share of time for snapshots, the other takes almost no snapshots.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import tinker

from app import settings as settings_module
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import connect
from ops.bench import batches, client_batches, models, servers, side, timing
from ops.bench.report import Goal, Outcome
from ops.bench.timing import summary

_ROUNDS = 12
_STEPS = 200
_THREADS = 1
_DEFAULT = EngineSettings().snapshot_share
_OFF = 1e-9
# The budget of 2 %, and the noise that a shared machine adds to a mean of this many steps.
_GOAL = 1.05


def run(folder: Path, rounds: int = _ROUNDS, steps: int = _STEPS) -> Outcome:
    base = models.tiny(folder / "base")
    for name in ("with", "without"):
        (folder / name).mkdir()
    with (
        side.threads(_THREADS),
        servers.running_stack(folder / "with", base, {"snapshot_share": _DEFAULT}) as taking,
        servers.running_stack(folder / "without", base, {"snapshot_share": _OFF}) as not_taking,
        tinker.ServiceClient(base_url=taking.url, api_key=servers.API_KEY) as some,
        tinker.ServiceClient(base_url=not_taking.url, api_key=servers.API_KEY) as none,
    ):
        stacks = {"with": _Steps(some, taking, base.name), "without": _Steps(none, not_taking, base.name)}
        sides = {name: partial(stack.measure, steps) for name, stack in stacks.items()}
        timing.alternate(1, sides)
        found = timing.alternate(rounds, sides)
        seqs = {name: s.snapshot_seq() for name, s in stacks.items()}
    return _outcome(found, seqs, rounds, steps)


class _Steps:
    def __init__(self, service: tinker.ServiceClient, stack: servers.Stack, base: str) -> None:
        self._client = service.create_lora_training_client(base_model=base, rank=32).result()
        self._stack = stack
        self._data = client_batches.datums(batches.random_tokens(4, 12, models.TINY_VOCAB_SIZE))
        self._adam = client_batches.adam()

    def measure(self, count: int) -> float:
        """Returns the ms per step.

        All steps are submitted at once, so that delays of the trainer show and client waits do not.
        """
        started = time.perf_counter()
        pending: list[Any] = []
        for _ in range(count):
            pending += [self._client.forward_backward(self._data, batches.LOSS), self._client.optim_step(self._adam)]
        for future in pending:
            future.result()
        return 1000 * (time.perf_counter() - started) / count

    def snapshot_seq(self) -> int:
        """Seq of the newest durable snapshot, -1 if there is none."""
        with connect(settings_module.load(self._stack.settings_file).redis.url) as client:
            return int(client.hget(keys.model(self._client.model_id), "snapshot_seq") or -1)


def _outcome(found: dict[str, list[float]], seqs: dict[str, int], rounds: int, steps: int) -> Outcome:
    figures: dict[str, Any] = {
        "rounds": rounds,
        "steps_a_round": steps,
        "snapshot_share": {"with": _DEFAULT, "without": _OFF},
        "newest_snapshot_seq": seqs,
        **{f"step_{name}_ms": summary(samples) | {"mean": mean(samples)} for name, samples in found.items()},
    }
    ratio = mean(found["with"]) / mean(found["without"])
    figures["cost"] = {"mean": ratio, "best_round": min(found["with"]) / min(found["without"])}
    return Outcome(figures, (Goal("step with snapshots over without", ratio, "at_most", _GOAL, ""),))

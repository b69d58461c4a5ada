"""Part of a save that blocks other Ops: a step, a save, and a save with a step, in alternation.

Only the copy (the stage "run") blocks. "write", hashing and uploading continue in the background. Here both take all of
the same cores, so this hides little of the total time ("hidden"), but no Op waits for it.

SmolLM2-135M-Instruct with a rank-32 adapter, saved with its optimizer state; 4 x 256 tokens a step.
"""

from __future__ import annotations

import itertools
import json
import os
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tinker

from ops.bench import batches, client_batches, metrics, models, servers, side, timing
from ops.bench.report import Goal, Outcome

_ROWS, _LENGTH = 4, 256
_RANK = 32
_ROUNDS = 8
_SAVE = "save_weights"
_GOAL = 0.25
_THREADS = len(os.sched_getaffinity(0))


def run(folder: Path) -> Outcome:
    base = models.bundled()
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    with (
        side.threads(_THREADS),
        servers.running_stack(folder, base) as stack,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        calls = _Calls(service, base.name, vocab_size)
        sides = {what: partial(calls.measure, what) for what in ("step", "save", "save step")}
        timing.alternate(1, sides)
        before = metrics.read(stack.metrics_url("trainer"))
        found = timing.alternate(_ROUNDS, sides)
        after = metrics.read(stack.metrics_url("trainer"))
    stages = metrics.stages_ms(before, after, _SAVE)
    stages["write"] = metrics.mean_ms(before, after, "tinsmith_op_stage_seconds", kind=_SAVE, stage="write")
    return _outcome(found, stages)


class _Calls:
    def __init__(self, service: tinker.ServiceClient, base: str, vocab_size: int) -> None:
        self._client = service.create_lora_training_client(base_model=base, rank=_RANK).result()
        self._data = client_batches.datums(batches.random_tokens(_ROWS, _LENGTH, vocab_size))
        self._adam = client_batches.adam()
        self._names = map("save-{}".format, itertools.count())

    def measure(self, what: str) -> float:
        """Sends all calls at once and returns the ms until all results have arrived."""
        return timing.timed_ms(lambda: [future.result() for future in self._send(what)])

    def _send(self, what: str) -> list[Any]:
        pending: list[Any] = []
        if "save" in what:
            pending.append(self._client.save_state(next(self._names)))
        if "step" in what:
            pending += [self._client.forward_backward(self._data, batches.LOSS), self._client.optim_step(self._adam)]
        return pending


def _outcome(found: dict[str, list[float]], stages: dict[str, float]) -> Outcome:
    step, save, both = (min(found[what]) for what in ("step", "save", "save step"))
    in_the_way = stages["run"] / (stages["run"] + stages["write"])
    figures = {
        "rounds": _ROUNDS,
        "threads": _THREADS,
        **{f"{what.replace(' ', '_and_')}_ms": timing.summary(samples) for what, samples in found.items()},
        "save_stages_ms": stages,
        "hidden": {
            "best": (step + save - both) / min(step, save),
            "median_round": median((a + b - c) / min(a, b) for a, b, c in zip(*found.values(), strict=True)),
        },
    }
    return Outcome(figures, (Goal("share of a save in the way of others", in_the_way, "at_most", _GOAL, ""),))

"""Eight tenants on one trainer that share passes, against one tenant with all their datums.

SmolLM2-135M-Instruct in bfloat16; each tenant has its own SDK client and LoRA adapter. Small batches (1 x 64) must not
cost more because they come from eight tenants. Full batches (4 x 256) must cost no more than one tenant after another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tinker

from ops.bench import batches, client_batches, models, servers, side, timing
from ops.bench.report import Goal, Outcome

RANK = 16
_TENANTS = 8
_SMALL, _FULL = (1, 64), (4, 256)
_ROUNDS, _STEPS = 3, 3
_SMALL_GOAL, _FULL_GOAL = 0.9, 0.95


def run(folder: Path) -> Outcome:
    base = models.bundled()
    base = base.model_copy(update={"trainer": base.trainer.model_copy(update={"exact": False})})
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]

    def tokens(rows: int, length: int) -> np.ndarray:
        return batches.random_tokens(rows, length, vocab_size)

    with side.threads(side.CORES), servers.running_stack(folder, base) as stack, ExitStack() as open_:
        clients = [_client(stack, base.name, open_) for _ in range(_TENANTS + 1)]
        tenants, single = clients[:-1], clients[-1:]
        small, full = client_batches.datums(tokens(*_SMALL)), client_batches.datums(tokens(*_FULL))
        whole = client_batches.datums(tokens(_TENANTS * _SMALL[0], _SMALL[1]))
        sides = {
            "small_together": lambda: _step_ms(tenants, small),
            "small_one_tenant": lambda: _step_ms(single, whole),
            "full_together": lambda: _step_ms(tenants, full, steps=1),
            "full_one_by_one": lambda: sum(_step_ms([client], full, steps=1) for client in tenants),
        }
        timing.alternate(1, sides)
        rounds = timing.alternate(_ROUNDS, sides)
    return _outcome(rounds)


def _client(stack: servers.Stack, base: str, open_: ExitStack) -> tinker.TrainingClient:
    service = open_.enter_context(tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY))
    return service.create_lora_training_client(base_model=base, rank=RANK).result()


def _step_ms(clients: Sequence[tinker.TrainingClient], data: list[tinker.Datum], steps: int = _STEPS) -> float:
    """Returns the ms of a step in which every client trains on `data`: all submit both calls, then wait for both."""
    adam = client_batches.adam()
    started = time.perf_counter()
    for _ in range(steps):
        pending = [(client.forward_backward(data, batches.LOSS), client.optim_step(adam)) for client in clients]
        for backward, step in pending:
            backward.result()
            step.result()
    return 1000 * (time.perf_counter() - started) / steps


def _outcome(rounds: dict[str, list[float]]) -> Outcome:
    """The goals are for the best step of each side: on a shared machine, noise only ever adds time."""
    pairs = {"small": ("small_together", "small_one_tenant"), "full": ("full_together", "full_one_by_one")}
    ratios: dict[str, dict[str, float]] = {}
    for name, (together, other) in pairs.items():
        ours, theirs = rounds[together], rounds[other]
        each = [b / a for a, b in zip(ours, theirs, strict=True)]
        ratios[name] = {"best_step": min(theirs) / min(ours), "median_round": median(each)}
    figures: dict[str, Any] = {
        "tenants": _TENANTS,
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "step_ms": {name: {"best": min(found), "median": median(found)} for name, found in rounds.items()},
        "tokens_per_s_ratio": ratios,
    }
    return Outcome(
        figures,
        (
            Goal(
                "eight small batches over one of their size", ratios["small"]["best_step"], "at_least", _SMALL_GOAL, ""
            ),
            Goal("eight full batches over one by one", ratios["full"]["best_step"], "at_least", _FULL_GOAL, ""),
        ),
    )

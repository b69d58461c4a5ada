"""Fairness among ten tenants of one trainer and one sampler: one heavy tenant and nine light ones.

SmolLM2-135M-Instruct. The heavy tenant wants as much as all others together: it trains four models, each with calls of
four steps under way, and keeps a hundred samples under way. A light tenant has one model, waits for each of its steps,
and keeps four samples under way, which is still more than a tenth of the batch. So each tenant should get a tenth. The
figure is Jain's index of the tenants' throughput, which is 1 if all got the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tinker
from tinker import types

from ops.bench import batches, client_batches, models, servers, side
from ops.bench.report import Goal, Outcome

_RANK = 8
_LIGHT = 9
_MODELS, _AHEAD = 4, 4
_SAMPLES, _LIGHT_SAMPLES = 100, 4
_BATCH, _TOKENS = 16, 16
_WARM_S, _MEASURED_S = 15.0, 60.0
_JAIN_GOAL = 0.95
# A light tenant waits for one turn of each other tenant and has its own. A step is two Ops: a batch and an optim_step.
_WAIT_GOAL = 15.0


@dataclass
class Tenant:
    """A caller with its own key. `done` has (end time, duration in seconds) of each of its work units."""

    service: tinker.ServiceClient
    heavy: bool
    done: list[tuple[float, float]] = field(default_factory=list)

    def keep(self, count: int, start: Callable[[], Any], stop: threading.Event) -> None:
        """Keeps this many units under way and starts the next when the oldest ends."""
        pending: deque[tuple[float, Any]] = deque()
        while not stop.is_set() or pending:
            while not stop.is_set() and len(pending) < count:
                pending.append((time.monotonic(), start()))
            began, future = pending.popleft()
            future.result()
            ended = time.monotonic()
            self.done.append((ended, ended - began))

    def between(self, start: float, end: float) -> list[float]:
        return [took for at, took in self.done if start <= at < end]


def run(folder: Path) -> Outcome:
    base = models.bundled()
    base = base.model_copy(update={"sampler": base.sampler.model_copy(update={"max_batch": _BATCH})})
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    keys = [f"tml-bench-tenant-{i}" for i in range(_LIGHT + 1)]
    with side.threads(side.CORES), servers.running_stack(folder, base, keys=keys) as stack, ExitStack() as open_:
        services = [open_.enter_context(tinker.ServiceClient(base_url=stack.url, api_key=key)) for key in keys]
        training = _measured(services, lambda tenant: _trainers(tenant, base.name, vocab_size))
        sampling = _measured(services, lambda tenant: _samplers(tenant, base.name))
    return _outcome({"training": training, "sampling": sampling})


Work = Sequence[tuple[int, Callable[[], Any]]]
"""The number of each to keep under way, and the call that starts one."""


def _trainers(tenant: Tenant, base: str, vocab_size: int) -> Work:
    data, adam = client_batches.datums(batches.random_tokens(1, 64, vocab_size)), client_batches.adam()

    def step(client: tinker.TrainingClient) -> Any:
        client.forward_backward(data, batches.LOSS)
        return client.optim_step(adam)

    count = _MODELS if tenant.heavy else 1
    clients = [tenant.service.create_lora_training_client(base_model=base, rank=_RANK).result() for _ in range(count)]
    return [(_AHEAD if tenant.heavy else 1, partial(step, client)) for client in clients]


def _samplers(tenant: Tenant, base: str) -> Work:
    client = tenant.service.create_sampling_client(base_model=base)
    prompt, params = types.ModelInput.from_ints(list(range(1, 17))), types.SamplingParams(max_tokens=_TOKENS, stop=[])
    return [(_SAMPLES if tenant.heavy else _LIGHT_SAMPLES, lambda: client.sample(prompt, 1, params))]


def _measured(services: Sequence[tinker.ServiceClient], work_of: Callable[[Tenant], Work]) -> dict[str, Any]:
    tenants = [Tenant(service, heavy=i == 0) for i, service in enumerate(services)]
    work, stop = [work_of(tenant) for tenant in tenants], threading.Event()
    threads = [
        threading.Thread(target=tenant.keep, args=(count, start, stop))
        for tenant, parts in zip(tenants, work, strict=True)
        for count, start in parts
    ]
    for thread in threads:
        thread.start()
    time.sleep(_WARM_S)
    began = time.monotonic()
    time.sleep(_MEASURED_S)
    ended = time.monotonic()
    stop.set()
    for thread in threads:
        thread.join()
    return _figures([tenant.between(began, ended) for tenant in tenants], ended - began)


def _figures(done: Sequence[Sequence[float]], seconds: float) -> dict[str, Any]:
    """Figures from the finished units of each tenant, the heavy tenant first. All units have the same size."""
    counts = [len(units) for units in done]
    turn = seconds / max(1, sum(counts))
    waits = [took for units in done[1:] for took in units] or [float("inf")]
    return {
        "units": counts,
        "jain": jain(counts),
        "seconds_a_unit": turn,
        "light_wait_units": {"median": median(waits) / turn, "longest": max(waits) / turn},
    }


def jain(got: Sequence[float]) -> float:
    """Jain's index: 1 if all got the same, 1 / n if one tenant got everything."""
    squares = sum(one * one for one in got)
    return sum(got) ** 2 / (len(got) * squares) if squares else 0.0


def _outcome(figures: dict[str, dict[str, Any]]) -> Outcome:
    wait = figures["training"]["light_wait_units"]["median"]
    return Outcome(
        {"tenants": _LIGHT + 1, "measured_s": _MEASURED_S, "max_batch": _BATCH, **figures},
        (
            Goal("Jain's index of ten tenants' steps", figures["training"]["jain"], "at_least", _JAIN_GOAL, ""),
            Goal("Jain's index of ten tenants' samples", figures["sampling"]["jain"], "at_least", _JAIN_GOAL, ""),
            Goal("a light tenant's wait for a step, in steps", wait, "at_most", _WAIT_GOAL, ""),
        ),
    )

"""Overhead of the service per operation: each call is awaited, on a model with almost no compute.

There are three sides. Plain HTTP against `tinsmith up`: its difference to the third side is the service's overhead. The
same calls through the SDK: its own work on the same two cores is added. The training backend called directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tinker

from ops.bench import batches, client_batches, metrics, models, servers, side, timing
from ops.bench.client import Client
from ops.bench.report import Goal, Outcome
from ops.bench.timing import summary

RANK = 8
_GOAL_MS = 10.0
# A step this small gains nothing from a second thread, which would take the API's core on a two-core machine.
_THREADS = 1
_ROUNDS = 10
_CALLS = 20
_KINDS = ("forward_backward", "optim_step")
Samples = dict[str, list[float]]
Readings = tuple[metrics.Reading, metrics.Reading]
"""The trainer's metrics, and the API's."""


def tokens() -> np.ndarray:
    return batches.random_tokens(4, 12, models.TINY_VOCAB_SIZE)


def run(folder: Path) -> Outcome:
    base = models.tiny(folder / "base")
    with (
        side.threads(_THREADS),
        servers.running_stack(folder, base) as stack,
        side.running("ops.bench.bare_backend", base.model_dump_json(), folder / "bare.log") as bare,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        sdk = _Sdk(service.create_lora_training_client(base_model=base.name, rank=RANK).result())
        http = _Http(stack.url, base.name)
        sides: dict[str, Callable[[], Any]] = {
            "sdk": lambda: sdk.measure(_CALLS),
            "http": lambda: http.measure(_CALLS),
            "bare": lambda: bare.measure(_CALLS),
            "inside": lambda: _readings(stack),
        }
        warm_up, rounds = timing.alternate(1, sides), timing.alternate(_ROUNDS, sides)
    readings = [*warm_up["inside"], *rounds["inside"]]
    return _outcome(rounds, {kind: _inside(kind, readings) for kind in _KINDS})


class _Sdk:
    def __init__(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self._data, self._adam = client_batches.datums(tokens()), client_batches.adam()

    def measure(self, count: int) -> Samples:
        """Returns the ms of each call, until its result arrives."""
        found: Samples = {kind: [] for kind in _KINDS}
        for _ in range(count):
            found["forward_backward"].append(timing.timed_ms(self._forward_backward))
            found["optim_step"].append(timing.timed_ms(self._optim_step))
        return found

    def _forward_backward(self) -> None:
        self._client.forward_backward(self._data, batches.LOSS).result()

    def _optim_step(self) -> None:
        self._client.optim_step(self._adam).result()


class _Http:
    """A separate model on one connection."""

    def __init__(self, url: str, base: str) -> None:
        self._client = Client(url)
        self._model_id, request_id = self._client.admit_model(base, RANK)
        self._client.result(request_id)
        self._request = client_batches.request(tokens(), self._model_id)
        self._seq = 0

    def measure(self, count: int) -> Samples:
        """Returns the ms of each call's POST (`kind.post`) and poll (`kind.poll`), and of both (`kind`)."""
        found: Samples = {f"{kind}{part}": [] for kind in _KINDS for part in ("", ".post", ".poll")}
        for _ in range(count):
            for kind in _KINDS:
                self._measure(kind, found)
        return found

    def _measure(self, kind: str, found: Samples) -> None:
        self._seq += 1
        started = time.perf_counter()
        request_id = self._post(kind)
        posted = time.perf_counter()
        self._client.result(request_id)
        done = time.perf_counter()
        for part, seconds in (("", done - started), (".post", posted - started), (".poll", done - posted)):
            found[kind + part].append(seconds * 1000)

    def _post(self, kind: str) -> str:
        if kind == "optim_step":
            adam = {"learning_rate": batches.ADAM.learning_rate, "eps": batches.ADAM.eps}
            return self._client.optim_step(self._model_id, self._seq, adam)
        self._request.seq_id = self._seq
        return self._client.forward_backward(self._request)


def _readings(stack: servers.Stack) -> Readings:
    return metrics.read(stack.metrics_url("trainer")), metrics.read(f"{stack.url}/metrics")


def _inside(kind: str, readings: Sequence[Readings]) -> dict[str, float]:
    """Metrics of the processes themselves, over the SDK's and the plain calls: the median of the rounds' means."""
    rounds = [
        {"api_post": _api_post_ms(api_before, api_after, kind), **metrics.stages_ms(before, after, kind)}
        for (before, api_before), (after, api_after) in pairwise(readings)
    ]
    return {name: median(means[name] for means in rounds) for name in rounds[0]}


def _api_post_ms(before: metrics.Reading, after: metrics.Reading, kind: str) -> float:
    return metrics.mean_ms(before, after, "tinsmith_request_seconds", route=f"/api/v1/{kind}", status="200")


def _outcome(rounds: Mapping[str, Sequence[Samples]], inside: Mapping[str, dict[str, float]]) -> Outcome:
    figures = {kind: _figures(kind, rounds) | {"inside_ms": inside[kind]} for kind in _KINDS}
    goals = (Goal(f"{kind}: added p50", figures[kind]["added_ms"]["p50"], "at_most", _GOAL_MS, "ms") for kind in _KINDS)
    return Outcome({"rounds": _ROUNDS, "calls_a_round": _CALLS, "threads": _THREADS, **figures}, tuple(goals))


def _figures(kind: str, rounds: Mapping[str, Sequence[Samples]]) -> dict[str, Any]:
    bare = _p50s(rounds["bare"], kind)
    return {
        "added_ms": _added(rounds["http"], kind, bare),
        "added_with_the_sdk_ms": _added(rounds["sdk"], kind, bare),
        **{f"{name}_ms": summary(_all(rounds[name], kind)) for name in ("sdk", "bare", "http")},
        **{f"http_{part}_ms": summary(_all(rounds["http"], f"{kind}.{part}")) for part in ("post", "poll")},
    }


def _added(rounds: Sequence[Samples], kind: str, bare: Sequence[float]) -> dict[str, float]:
    added = [ours - floor for ours, floor in zip(_p50s(rounds, kind), bare, strict=True)]
    p95 = summary(_all(rounds, kind))["p95"] - median(bare)
    return {"p50": median(added), "p95": p95, "best_round_p50": min(added)}


def _p50s(rounds: Sequence[Samples], key: str) -> list[float]:
    return [median(samples[key]) for samples in rounds]


def _all(rounds: Sequence[Samples], key: str) -> list[float]:
    return [ms for samples in rounds for ms in samples[key]]

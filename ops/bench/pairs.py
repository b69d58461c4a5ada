"""Pairs of forward_backward and optim_step that a client sends ahead, beside the same Ops on the backend alone.

Some pairs are always in flight, so the trainer need not wait for a call. What is left is the service's own work: on two
cores the API, the state server and the client share one of them. A larger vocabulary makes a longer step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import tinker

from ops.bench import batches, client_batches, models, overhead, servers, side, timing
from ops.bench.report import Goal, Outcome

_VOCABULARIES = (models.TINY_VOCAB_SIZE, 49_152)
_IN_FLIGHT, _PAIRS, _ROUNDS = 4, 40, 8
_THREADS = 1
_GOAL = 0.8


def run(folder: Path) -> Outcome:
    found = {f"vocabulary {size}": _figures(_measure(folder / str(size), size)) for size in _VOCABULARIES}
    goals = [
        Goal(f"{name}: rate, of the backend's", one["of_bare"], "at_least", _GOAL, "x") for name, one in found.items()
    ]
    about = {"rounds": _ROUNDS, "pairs_a_round": _PAIRS, "in_flight": _IN_FLIGHT, "threads": _THREADS}
    return Outcome({**about, "pairs": found}, tuple(goals))


def _measure(folder: Path, vocab_size: int) -> Mapping[str, Sequence[float]]:
    """The ms of a pair in each round, of both sides."""
    folder.mkdir()
    base = models.tiny(folder / "base", vocab_size)
    with (
        side.threads(_THREADS),
        servers.running_stack(folder, base) as stack,
        side.running("ops.bench.bare_backend", base.model_dump_json(), folder / "bare.log") as bare,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        client = service.create_lora_training_client(base_model=base.name, rank=overhead.RANK).result()
        sides = {"sdk": lambda: _sdk_ms(client), "bare": lambda: _bare_ms(bare)}
        timing.alternate(1, sides)
        return timing.alternate(_ROUNDS, sides)


def _sdk_ms(client: tinker.TrainingClient) -> float:
    data, adam = client_batches.datums(overhead.tokens()), client_batches.adam()
    sent = deque[tuple[tinker.APIFuture[tinker.ForwardBackwardOutput], tinker.APIFuture[tinker.OptimStepResponse]]]()
    began = time.perf_counter()
    for _ in range(_PAIRS):
        sent.append((client.forward_backward(data, batches.LOSS), client.optim_step(adam)))
        if len(sent) == _IN_FLIGHT:
            _read(*sent.popleft())
    while sent:
        _read(*sent.popleft())
    return (time.perf_counter() - began) * 1000 / _PAIRS


def _read(
    backward: tinker.APIFuture[tinker.ForwardBackwardOutput], step: tinker.APIFuture[tinker.OptimStepResponse]
) -> None:
    backward.result()
    step.result()


def _bare_ms(bare: side.Side) -> float:
    return sum(map(sum, bare.measure(_PAIRS).values())) / _PAIRS


def _figures(rounds: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
    ratio = median(bare / sdk for bare, sdk in zip(rounds["bare"], rounds["sdk"], strict=True))
    return {"of_bare": ratio, **{f"{name}_pair_ms": median(found) for name, found in rounds.items()}}

"""A training step beside a sampling tenant, on a CPU whose cores the trainer and the sampler share.

SmolLM2-135M-Instruct through the SDK: steps of one datum of 512 tokens alone, and then while another client samples
eight prompts again and again. The goal bounds the slowest steps: p95 beside sampling over the median alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import tinker
from tinker import types

from ops.bench import batches, client_batches, models, servers, timing
from ops.bench.report import Goal, Outcome

_LENGTH, _PROMPT, _SAMPLED = 512, 64, 64
_PROMPTS = 8
_RANK = 8
_WARM, _STEPS = 3, 20
_GOAL = 2.5


def run(folder: Path) -> Outcome:
    base = models.bundled()
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    with (
        servers.running_stack(folder, base) as stack,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        training = service.create_lora_training_client(base_model=base.name, rank=_RANK).result()
        data = client_batches.datums(batches.random_tokens(1, _LENGTH, vocab_size))
        sampler = service.create_sampling_client(base_model=base.name).result()
        _steps(training, data, _WARM)
        alone = _steps(training, data, _STEPS)
        with _sampling(sampler):
            _steps(training, data, _WARM)
            beside = _steps(training, data, _STEPS)
    figures = {
        "steps": _STEPS,
        "tokens": _LENGTH,
        "alone_ms": timing.summary(alone),
        "beside_ms": timing.summary(beside),
    }
    slowest = timing.summary(beside)["p95"] / median(alone)
    return Outcome(figures, (Goal("a step beside sampling, p95, over one alone", slowest, "at_most", _GOAL, "x"),))


def _steps(training: tinker.TrainingClient, data: list[types.Datum], count: int) -> list[float]:
    """The ms of each step."""

    def step() -> None:
        forward, update = training.forward_backward(data, batches.LOSS), training.optim_step(client_batches.adam())
        forward.result()
        update.result()

    return [timing.timed_ms(step) for _ in range(count)]


@contextmanager
def _sampling(sampler: tinker.SamplingClient) -> Iterator[None]:
    """Samples the prompts again and again, from a thread."""
    over = threading.Event()
    prompts = [types.ModelInput.from_ints(list(range(100 + i, 100 + i + _PROMPT))) for i in range(_PROMPTS)]
    params = types.SamplingParams(max_tokens=_SAMPLED, temperature=1.0)

    def sample() -> None:
        while not over.is_set():
            for future in [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]:
                future.result()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

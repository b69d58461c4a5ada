"""Delay until new weights can be sampled: from the save call to their first token, less the time of an ordinary token.

SmolLM2-135M-Instruct with a rank-32 adapter, through the SDK, after an `optim_step` that has its result. The delay
includes the copy of the state, its transfer through shared memory ("write"), the commit, and the sampler's read.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import tinker
from tinker import types

from app.settings import BaseModelSettings
from ops.bench import batches, client_batches, metrics, models, servers, timing
from ops.bench.report import Goal, Outcome

_ROWS, _LENGTH = 1, 64
_PROMPT = 16
_RANK = 32
_ROUNDS = 12
_SAVE = "save_weights"
_GOAL_MS = 1000.0
_ONE_TOKEN = types.SamplingParams(max_tokens=1, temperature=0.0)


def run(folder: Path) -> Outcome:
    return measured(folder, models.bundled(), _GOAL_MS)


def measured(folder: Path, base: BaseModelSettings, goal_ms: float) -> Outcome:
    """The delay of an adapter of `base`."""
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    with (
        servers.running_stack(folder, base) as stack,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        rounds = _Rounds(service, base.name, vocab_size)
        rounds.run()
        before = metrics.read(stack.metrics_url("trainer"))
        found = [rounds.run() for _ in range(_ROUNDS)]
        after = metrics.read(stack.metrics_url("trainer"))
    stages = metrics.stages_ms(before, after, _SAVE)
    stages["write"] = metrics.mean_ms(before, after, "tinsmith_op_stage_seconds", kind=_SAVE, stage="write")
    return _outcome(found, stages, goal_ms)


class _Rounds:
    def __init__(self, service: tinker.ServiceClient, base: str, vocab_size: int) -> None:
        self._training = service.create_lora_training_client(base_model=base, rank=_RANK).result()
        self._data = client_batches.datums(batches.random_tokens(_ROWS, _LENGTH, vocab_size))
        self._prompt = types.ModelInput.from_ints(list(range(100, 100 + _PROMPT)))

    def run(self) -> tuple[float, float, float]:
        """Measures the ms until the new weights have a client, until their first token, and of one more token."""
        self._training.forward_backward(self._data, batches.LOSS).result()
        self._training.optim_step(client_batches.adam()).result()
        clients: list[tinker.SamplingClient] = []
        saved = timing.timed_ms(lambda: clients.append(self._training.save_weights_and_get_sampling_client().result()))
        first, bare = (timing.timed_ms(lambda: self._draw(clients[0])) for _ in range(2))
        return saved, saved + first, bare

    def _draw(self, client: tinker.SamplingClient) -> None:
        client.sample(self._prompt, num_samples=1, sampling_params=_ONE_TOKEN).result()


def _outcome(found: list[tuple[float, float, float]], stages: dict[str, float], goal_ms: float) -> Outcome:
    added = [first - bare for _, first, bare in found]
    saved, first, bare = (timing.summary(samples) for samples in zip(*found, strict=True))
    figures = {
        "rounds": len(found),
        "saved_ms": saved,
        "first_token_ms": first,
        "bare_token_ms": bare,
        "added_ms": timing.summary(added),
        "save_stages_ms": stages,
    }
    return Outcome(figures, (Goal("hand-over, p50", median(added), "at_most", goal_ms, "ms"),))

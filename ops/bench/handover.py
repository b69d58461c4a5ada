"""Delay until new weights can be sampled: from the save call to their first token, less the time of an ordinary token.

SmolLM2-135M-Instruct through the SDK, after an `optim_step` that has its result: with a rank-32 adapter, and fully
fine-tuned. The delay includes the copy of the state, its transfer through shared memory ("write"), the commit, and the
sampler's read.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import tinker
from tinker import types

from app.services.base_models import trainer_role
from app.settings import BaseModelSettings, TrainerSettings
from ops.bench import batches, client_batches, metrics, models, servers, timing
from ops.bench.report import Goal, Outcome

_ROWS, _LENGTH = 1, 64
_PROMPT = 16
_RANK = 32
_ALL_WEIGHTS = 0
_ROUNDS = 12
_SAVE = "save_weights"
_GOAL_MS = 1000.0
_ONE_TOKEN = types.SamplingParams(max_tokens=1, temperature=0.0)


def run(folder: Path) -> Outcome:
    base = models.bundled()
    sections = {"full": TrainerSettings(), "full_sampler": base.sampler}
    adapter = measured(_new(folder / "adapter"), base, _GOAL_MS)
    full = measured(_new(folder / "full"), base.model_copy(update=sections), _GOAL_MS, _ALL_WEIGHTS)
    return Outcome({**adapter.figures, "full": full.figures}, (*adapter.goals, *full.goals))


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def measured(folder: Path, base: BaseModelSettings, goal_ms: float, rank: int = _RANK) -> Outcome:
    """The delay of an adapter of `base`, or of all its weights with a rank of 0."""
    role = trainer_role(full=rank == _ALL_WEIGHTS)
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    with (
        servers.running_stack(folder, base) as stack,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
    ):
        rounds = _Rounds(service, base.name, vocab_size, rank)
        rounds.run()
        before = metrics.read(stack.metrics_url(role))
        found = [rounds.run() for _ in range(_ROUNDS)]
        after = metrics.read(stack.metrics_url(role))
    stages = metrics.stages_ms(before, after, _SAVE)
    stages["write"] = metrics.mean_ms(before, after, "tinsmith_op_stage_seconds", kind=_SAVE, stage="write")
    weights = "hand-over" if rank else "hand-over of all weights"
    return _outcome(found, stages, Goal(f"{weights}, p50", median(_added_ms(found)), "at_most", goal_ms, "ms"))


class _Rounds:
    def __init__(self, service: tinker.ServiceClient, base: str, vocab_size: int, rank: int) -> None:
        self._training = service.create_lora_training_client(base_model=base, rank=rank).result()
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


def _added_ms(found: list[tuple[float, float, float]]) -> list[float]:
    return [first - bare for _, first, bare in found]


def _outcome(found: list[tuple[float, float, float]], stages: dict[str, float], goal: Goal) -> Outcome:
    saved, first, bare = (timing.summary(samples) for samples in zip(*found, strict=True))
    figures = {
        "rounds": len(found),
        "saved_ms": saved,
        "first_token_ms": first,
        "bare_token_ms": bare,
        "added_ms": timing.summary(_added_ms(found)),
        "save_stages_ms": stages,
    }
    return Outcome(figures, (goal,))

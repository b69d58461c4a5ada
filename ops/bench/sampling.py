"""Sampling through the SDK from a stack with vLLM, against vLLM's own offline batch.

SmolLM2-135M-Instruct in bfloat16 with an adapter of rank 32: 16 prompts x 4 samples x 64 tokens, and 64 single samples
requested from 64 threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import tinker
from tinker import types

from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings
from ops.bench import batches, client_batches, models, servers, side, timing
from ops.bench.bare_sampler import PROMPTS, SAMPLES, TOKENS, requests
from ops.bench.report import Goal, Outcome

_RANK = 32
# Each side takes vLLM's CPU path 80 s, which is long enough for a stable rate.
_ROUNDS = 1
_GOALS = {"four each": 0.95, "single": 0.90}


def run(folder: Path) -> Outcome:
    return measured(folder, models.bundled(), _ROUNDS, TOKENS)


def measured(folder: Path, base: BaseModelSettings, rounds: int, tokens: int) -> Outcome:
    """The rates of an adapter of `base`, with so many tokens a sample."""
    base = base.model_copy(update={"sampler": base.sampler.model_copy(update={"backend": "vllm"})})
    vocab_size = json.loads((Path(base.path) / "config.json").read_text())["vocab_size"]
    with (
        side.threads(side.CORES),
        servers.running_stack(folder, base) as stack,
        side.running("ops.bench.bare_vllm", base.model_dump_json(), folder / "bare.log", str(tokens)) as bare,
        tinker.ServiceClient(base_url=stack.url, api_key=servers.API_KEY) as service,
        ThreadPoolExecutor(PROMPTS * SAMPLES) as threads,
    ):
        sdk = _Sdk(_sampling_client(service, base.name, vocab_size), requests(vocab_size, tokens), threads)
        sides = {
            "sdk four each": lambda: timing.timed_ms(sdk.four_each),
            "sdk single": lambda: timing.timed_ms(sdk.single),
            "bare": lambda: {name: ms[0] for name, ms in bare.measure(1).items()},
        }
        found: dict[str, list[Any]] = timing.alternate(rounds, sides)
    pairs = {name: (found[f"sdk {name}"], [one[name] for one in found["bare"]]) for name in _GOALS}
    return _outcome(pairs, PROMPTS * SAMPLES * tokens)


def _sampling_client(service: tinker.ServiceClient, base: str, vocab_size: int) -> tinker.SamplingClient:
    """A sampling client of an adapter that was trained for one step."""
    training = service.create_lora_training_client(base_model=base, rank=_RANK).result()
    data = client_batches.datums(batches.random_tokens(2, 32, vocab_size))
    training.forward_backward(data, batches.LOSS).result()
    training.optim_step(client_batches.adam()).result()
    return training.save_weights_and_get_sampling_client().result()


class _Sdk:
    def __init__(
        self, client: tinker.SamplingClient, asked: Sequence[SampleRequest], threads: ThreadPoolExecutor
    ) -> None:
        self._client, self._threads = client, threads
        self._prompts = [types.ModelInput.from_ints(request.prompt.tolist()) for request in asked]
        # With [] nothing stops a sample, not even the end token.
        self._params = types.SamplingParams(max_tokens=asked[0].max_tokens, stop=[])
        self._drawn = sum(request.num_samples * request.max_tokens for request in asked)

    def four_each(self) -> None:
        pending = [self._client.sample(prompt, SAMPLES, self._params) for prompt in self._prompts]
        self._check([future.result() for future in pending])

    def single(self) -> None:
        self._check(list(self._threads.map(self._one, self._prompts * SAMPLES)))

    def _one(self, prompt: types.ModelInput) -> types.SampleResponse:
        return self._client.sample(prompt, 1, self._params).result()

    def _check(self, results: Sequence[types.SampleResponse]) -> None:
        drawn = sum(len(sequence.tokens) for result in results for sequence in result.sequences)
        if drawn != self._drawn:
            raise RuntimeError(f"{drawn} tokens were sampled instead of {self._drawn}")


def _outcome(found: dict[str, tuple[list[float], list[float]]], drawn: int) -> Outcome:
    """The goals are for the best round of each side: on a shared machine, noise only ever adds time."""
    figures: dict[str, Any] = {"threads": side.CORES, "tokens": drawn}
    goals = []
    for name, (sdk, bare) in found.items():
        ratio = min(bare) / min(sdk)
        figures[name] = {
            "rounds": len(sdk),
            "sdk_tokens_per_s": batches.rates(drawn, sdk),
            "bare_tokens_per_s": batches.rates(drawn, bare),
            "ratio": {"best": ratio, "median_round": median(b / a for a, b in zip(sdk, bare, strict=True))},
        }
        goals.append(Goal(f"{name}: SDK over bare vLLM tokens/s", ratio, "at_least", _GOALS[name], ""))
    return Outcome(figures, tuple(goals))

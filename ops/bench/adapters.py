"""Cost of LoRA adapters in CPU sampling: the transformers sampler against its own base-model rate and against vLLM.

SmolLM2-135M-Instruct in bfloat16, 16 prompts x 4 samples x 64 tokens, adapters of rank 32 on every linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench import batches, models, side
from ops.bench.bare_sampler import PROMPTS, SAMPLES, TOKENS
from ops.bench.report import Goal, Outcome

# A vLLM round takes minutes, and vLLM is not a side of the close comparisons.
_ROUNDS = {"transformers": 3, "vllm": 1}
_OF_BASE_GOAL, _MIXED_GOAL, _OVER_VLLM_GOAL, _ALONE_GOAL = 0.8, 0.75, 4.0, 0.8
_DRAWN = PROMPTS * SAMPLES * TOKENS
_ALONE = ("alone", "generate")
Samples = Mapping[str, Sequence[float]]


def run(folder: Path) -> Outcome:
    with side.threads(side.CORES):
        found = {backend: _measured(folder, backend) for backend in _ROUNDS}
    return _outcome(found)


def _measured(folder: Path, backend: str) -> Samples:
    """Measures one side after the other, because idle vLLM processes spin."""
    base = models.bundled()
    base = base.model_copy(update={"sampler": base.sampler.model_copy(update={"backend": backend})})
    with side.running("ops.bench.bare_sampler", base.model_dump_json(), folder / f"{backend}.log") as bare:
        found: Samples = bare.measure(_ROUNDS[backend])
    return found


def _outcome(found: Mapping[str, Samples]) -> Outcome:
    """Ratios of the best rounds: on a shared machine, noise only ever adds time."""
    best = {backend: {name: min(ms) for name, ms in samples.items()} for backend, samples in found.items()}
    ours = best["transformers"]
    ratios = {
        "one adapter over base": ours["base"] / ours["one adapter"],
        "four adapters over one": ours["one adapter"] / ours["four adapters"],
        "one adapter over vLLM's": best["vllm"]["one adapter"] / ours["one adapter"],
        "one sample alone over transformers' generate": ours["generate"] / ours["alone"],
    }
    goals = zip(ratios.items(), (_OF_BASE_GOAL, _MIXED_GOAL, _OVER_VLLM_GOAL, _ALONE_GOAL), strict=True)
    figures: dict[str, Any] = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "tokens": _DRAWN,
        "tokens_per_s": {
            backend: {name: batches.rates(TOKENS if name in _ALONE else _DRAWN, ms) for name, ms in samples.items()}
            for backend, samples in found.items()
        },
        "ratios": ratios,
    }
    return Outcome(figures, tuple(Goal(name, value, "at_least", limit, "") for (name, value), limit in goals))

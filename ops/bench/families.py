"""LoRA training of random models of two families, against transformers and PEFT with the same adapter from PEFT files.

One model has experts, the other has recurrent layers (Gated DeltaNet). A sample is one forward and backward pass over
rows of equal length. "loop" is PEFT over transformers' Python loop over experts.

`python -m ops.bench.families FOLDER` is the side that measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

from app.settings import BaseModelSettings, TrainerSettings
from ops.bench import batches, side, timing
from ops.bench.bare_trainer import BareTrainer
from ops.bench.report import Goal, Outcome

_ROUNDS = 5
_ROWS, _LENGTH = 8, 256
_RANK = 16
_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
_DELTA_NET = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_CONFIGS = {
    "experts": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS),
    "hybrid": lambda: Qwen3_5TextConfig(**_SHAPE, **_DELTA_NET),
}
_PEFT, _LOOP = "transformers + PEFT", "loop"
Samples = dict[str, list[float]]


def run(folder: Path) -> Outcome:
    found: Samples = side.measured("ops.bench.families", str(folder), folder / "side.log", _ROUNDS)
    best = {name: min(samples) for name, samples in found.items()}
    tokens = _ROWS * _LENGTH
    figures = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "tokens": tokens,
        "tokens_per_s": {name: batches.rates(tokens, samples) for name, samples in found.items()},
    }
    goals = [
        Goal(f"families: {family} over {_PEFT}", best[f"{family}, {_PEFT}"] / best[family], "at_least", 1.0, "")
        for family in _CONFIGS
    ]
    loop = Goal("families: experts over the loop", best[f"experts, {_LOOP}"] / best["experts"], "at_least", 3.0, "")
    return Outcome(figures, (*goals, loop))


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of each pass, in turns."""
    sides: dict[str, Callable[[], float]] = {}
    for family in _CONFIGS:
        base, adapter = Path(sys.argv[1], family), Path(sys.argv[1], f"{family} adapter")
        _save(family, base)
        trainer = _trainer(base, adapter)
        op = batches.operation(batches.random_tokens(_ROWS, _LENGTH, _SHAPE["vocab_size"]))
        sides[family] = partial(trainer.timed_ms, {"m0": op})
        sides[f"{family}, {_PEFT}"] = _with_peft(base, adapter, "grouped_mm")
        if family == "experts":
            sides[f"{family}, {_LOOP}"] = _with_peft(base, adapter, "eager")
    return partial(timing.alternate, sides=sides)


def _save(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_CONFIGS[family](), dtype=torch.float32).save_pretrained(folder)


def _trainer(base: Path, adapter: Path) -> BareTrainer:
    settings = TrainerSettings(backend="torch", micro_batch_tokens=_ROWS * _LENGTH)
    trainer = BareTrainer(
        BaseModelSettings(name="bench/random", path=str(base), dtype="float32", trainer=settings), 1, _RANK
    )
    adapter.mkdir()
    trainer.save("m0", adapter)
    return trainer


def _with_peft(base: Path, adapter: Path, experts: str) -> Callable[[], float]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation(experts)
    tuned = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    tokens = torch.from_numpy(batches.random_tokens(_ROWS, _LENGTH, _SHAPE["vocab_size"])).long()

    def step() -> None:
        tuned(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        tuned.zero_grad(set_to_none=True)

    return lambda: timing.timed_ms(step)


if __name__ == "__main__":
    side.serve(prepare)

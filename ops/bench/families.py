"""Training and sampling of random models of two families with LoRA, against transformers and PEFT with the same adapter
from PEFT files.

One model has experts, the other has recurrent layers (Gated DeltaNet). A sample of training is one forward and backward
pass over rows of equal length, in fp32. "loop" is PEFT over transformers' Python loop over experts. "nf4", "int8" and
"fp8" are the same pass on a quantised base, and "auto" the one on the plain base in the dtype that they compute in. A
sample of sampling is all prompts at once: the transformers sampler against transformers' `generate`.

`python -m ops.bench.families FOLDER` is the side that measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings, TrainerSettings
from ops.bench import batches, models, side, timing
from ops.bench.bare_trainer import BareTrainer
from ops.bench.report import Goal, Outcome
from workers.backends.sampling.base import create

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
_PEFT, _LOOP, _SAMPLING = "transformers + PEFT", "loop", "sampling"
_DTYPES = ("auto", "nf4", "int8", "fp8")
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 16, 32, 64
_TRAINED, _DRAWN = _ROWS * _LENGTH, _PROMPTS * _NEW_TOKENS
Samples = dict[str, list[float]]


def run(folder: Path) -> Outcome:
    found: Samples = side.measured("ops.bench.families", str(folder), folder / "side.log", _ROUNDS)
    best = {name: min(samples) for name, samples in found.items()}
    figures = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "tokens": {"training": _TRAINED, "sampling": _DRAWN},
        "tokens_per_s": {
            name: batches.rates(_DRAWN if _SAMPLING in name else _TRAINED, samples) for name, samples in found.items()
        },
        "quantised_over_auto": {
            f"{family}, {dtype}": best[f"{family}, auto"] / best[f"{family}, {dtype}"]
            for family in _CONFIGS
            for dtype in _DTYPES[1:]
        },
    }
    goals = [
        Goal(f"families: {name} over {_PEFT}", best[f"{name}, {_PEFT}"] / best[name], "at_least", 1.0, "")
        for family in _CONFIGS
        for name in (family, f"{family}, {_SAMPLING}")
    ]
    loop = Goal("families: experts over the loop", best[f"experts, {_LOOP}"] / best["experts"], "at_least", 3.0, "")
    return Outcome(figures, (*goals, loop))


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of each pass, in turns."""
    sides: dict[str, Callable[[], float]] = {}
    for family in _CONFIGS:
        base, adapter = Path(sys.argv[1], family), Path(sys.argv[1], f"{family} adapter")
        _save(family, base)
        trainer = _trainer(base, "float32")
        adapter.mkdir()
        trainer.save("m0", adapter)
        op = batches.operation(batches.random_tokens(_ROWS, _LENGTH, _SHAPE["vocab_size"]))
        sides[family] = partial(trainer.timed_ms, {"m0": op})
        for dtype in _DTYPES:
            sides[f"{family}, {dtype}"] = partial(_trainer(base, dtype).timed_ms, {"m0": op})
        tuned = _tuned(base, adapter, "grouped_mm")
        sides[f"{family}, {_PEFT}"] = _training(tuned)
        if family == "experts":
            sides[f"{family}, {_LOOP}"] = _training(_tuned(base, adapter, "eager"))
        sides[f"{family}, {_SAMPLING}"] = _sampling(base, adapter)
        sides[f"{family}, {_SAMPLING}, {_PEFT}"] = _generating(tuned)
    return partial(timing.alternate, sides=sides)


def _save(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(_CONFIGS[family](), dtype=torch.float32).save_pretrained(folder)
    models.write_tokenizer(folder)


def _trainer(base: Path, dtype: str) -> BareTrainer:
    settings = TrainerSettings(backend="torch", micro_batch_tokens=_TRAINED)
    return BareTrainer(BaseModelSettings(name="bench/random", path=str(base), dtype=dtype, trainer=settings), 1, _RANK)


def _tuned(base: Path, adapter: Path, experts: str) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation(experts)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def _training(tuned: PeftModel) -> Callable[[], float]:
    tokens = torch.from_numpy(batches.random_tokens(_ROWS, _LENGTH, _SHAPE["vocab_size"])).long()

    def step() -> None:
        tuned.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        tuned.zero_grad(set_to_none=True)

    return lambda: timing.timed_ms(step)


def _generating(tuned: Any) -> Callable[[], float]:
    prompts = torch.from_numpy(_prompts()).long()
    drawn = {"do_sample": True, "min_new_tokens": _NEW_TOKENS, "max_new_tokens": _NEW_TOKENS, "pad_token_id": 0}
    every = torch.ones_like(prompts)
    return lambda: timing.timed_ms(lambda: tuned.eval().generate(input_ids=prompts, attention_mask=every, **drawn))


def _sampling(base: Path, adapter: Path) -> Callable[[], float]:
    sampler = create(
        BaseModelSettings(
            name="bench/random", path=str(base), dtype="float32", sampler=SamplerSettings(backend="transformers")
        )
    )
    sampler.open()
    sampler.load("m0", adapter)
    asked = [SampleRequest(row, 1, _NEW_TOKENS, seed, ignore_eos=True) for seed, row in enumerate(_prompts())]

    def draw() -> None:
        with ThreadPoolExecutor(_PROMPTS) as threads:
            list(threads.map(partial(sampler.sample, "m0"), asked))

    return lambda: timing.timed_ms(draw)


def _prompts() -> np.ndarray:
    return batches.random_tokens(_PROMPTS, _PROMPT_TOKENS, _SHAPE["vocab_size"])


if __name__ == "__main__":
    side.serve(prepare)

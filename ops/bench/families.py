"""Training and sampling of three random models with LoRA, against transformers and PEFT with the same adapter from PEFT
files.

One model has few experts, one has as many as Qwen3-30B-A3B (128, of which a token has 8), and one has recurrent layers
(Gated DeltaNet). A sample of training is one forward and backward pass over rows of equal length, in fp32. "loop" is
PEFT over transformers' Python loop over experts, whose cost grows with their number. "nf4", "int8" and "fp8" are the
same pass on a quantised base, and "auto" the one on the plain base in the dtype that they compute in. A sample of
sampling is all prompts at once: the transformers sampler against transformers' `generate`.

A ratio is the median of its rounds' ratios. The two sides of a round run one after the other, so that other work on the
machine slows both.

`python -m ops.bench.families FOLDER/training` is the side that trains, and saves what `FOLDER/sampling` samples from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
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
from workers.backends.sampling.backends import create

_ROUNDS = 7
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
_FEW = {"num_experts": 32, "num_experts_per_tok": 4}
_MANY = {"num_experts": 128, "num_experts_per_tok": 8}
_EXPERTS = {"moe_intermediate_size": 128, "decoder_sparse_step": 1}
_DELTA_NET = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_CONFIGS = {
    "experts": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, **_FEW),
    "128 experts": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, **_MANY),
    "hybrid": lambda: Qwen3_5TextConfig(**_SHAPE, **_DELTA_NET),
}
_TRAINING, _SAMPLING = "training", "sampling"
_PEFT, _LOOP = "transformers + PEFT", "loop"
_DTYPES = ("auto", "nf4", "int8", "fp8")
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 16, 32, 64
_TRAINED, _DRAWN = _ROWS * _LENGTH, _PROMPTS * _NEW_TOKENS
Samples = dict[str, list[float]]


def run(folder: Path) -> Outcome:
    found: Samples = {}
    # A process each, as in a stack. The sampler computes in more threads than there are cores; OpenMP's threads then
    # sleep between any two kernels of the process, and a pass of training takes 1.7 times as long.
    for kind in (_TRAINING, _SAMPLING):
        found |= side.measured("ops.bench.families", str(folder / kind), folder / f"{kind}.log", _ROUNDS)

    def faster(name: str, other: str) -> float:
        return median(b / a for a, b in zip(found[name], found[other], strict=True))

    figures = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "tokens": {"training": _TRAINED, "sampling": _DRAWN},
        "tokens_per_s": {
            name: batches.rates(_DRAWN if _SAMPLING in name else _TRAINED, samples) for name, samples in found.items()
        },
        "quantised_over_auto": {
            f"{family}, {dtype}": faster(f"{family}, {dtype}", f"{family}, auto")
            for family in _CONFIGS
            for dtype in _DTYPES[1:]
        },
    }
    goals = [
        Goal(f"families: {name} over {_PEFT}", faster(name, f"{name}, {_PEFT}"), "at_least", 1.0, "")
        for family in _CONFIGS
        for name in (family, f"{family}, {_SAMPLING}")
    ]
    over = {family: faster(family, f"{family}, {_LOOP}") for family in _CONFIGS if "experts" in family}
    loop = Goal("families: 128 experts over the loop", over["128 experts"], "at_least", 3.0, "")
    return Outcome(figures | {"over_loop": over}, (*goals, loop))


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of each pass, in turns."""
    folder = Path(sys.argv[1])
    sides = {_TRAINING: _training_sides, _SAMPLING: _sampling_sides}[folder.name]
    return partial(timing.alternate, sides=sides(folder.parent))


def _training_sides(folder: Path) -> dict[str, Callable[[], float]]:
    sides: dict[str, Callable[[], float]] = {}
    for family in _CONFIGS:
        base, adapter = _folders(folder, family)
        _save(family, base)
        trainer = _trainer(base, "float32")
        adapter.mkdir()
        trainer.save("m0", adapter)
        op = batches.operation(batches.random_tokens(_ROWS, _LENGTH, _SHAPE["vocab_size"]))
        sides[family] = partial(trainer.timed_ms, {"m0": op})
        sides[f"{family}, {_PEFT}"] = _training(_tuned(base, adapter, "grouped_mm"))
        if "experts" in family:
            sides[f"{family}, {_LOOP}"] = _training(_tuned(base, adapter, "eager"))
        for dtype in _DTYPES:
            sides[f"{family}, {dtype}"] = partial(_trainer(base, dtype).timed_ms, {"m0": op})
    return sides


def _sampling_sides(folder: Path) -> dict[str, Callable[[], float]]:
    sides: dict[str, Callable[[], float]] = {}
    for family in _CONFIGS:
        base, adapter = _folders(folder, family)
        sides[f"{family}, {_SAMPLING}"] = _sampling(base, adapter)
        sides[f"{family}, {_SAMPLING}, {_PEFT}"] = _generating(_tuned(base, adapter, "grouped_mm"))
    return sides


def _folders(folder: Path, family: str) -> tuple[Path, Path]:
    """Folders of the base model and of its adapter."""
    return folder / family, folder / f"{family} adapter"


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

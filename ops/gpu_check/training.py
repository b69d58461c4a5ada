"""One side of the figures of training: `python -m ops.gpu_check.training SIZE FOLDER tinsmith|peft`.

Trains the model of SIZE in FOLDER, and makes it first if it is not there. Prints one line of JSON for each batch:
seconds of each step, which is a forward and backward pass over 32,768 tokens and an optimizer step, and the most memory
it took. `peft` is a loop of transformers, PEFT and torch's fused AdamW over rows of equal length, with the faster of
two micro-batches.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from app.domain.ops import Batch, ForwardBackward, LoraSpec, OptimStep, Ragged
from app.errors import UserOpError
from app.settings import BaseModelSettings, TrainerSettings
from ops.bench import batches, timing
from ops.bench.bare_trainer import BareTrainer
from ops.gpu_check import shapes
from ops.gpu_check.device import device, finish
from workers.backends.failures import ran_out_of_memory
from workers.backends.training.base import Create

TINSMITH, PEFT = "tinsmith", "peft"
UNEVEN, SHARED = "2k, uneven", "2k, uneven, 16 tenants"
TENANTS = 16
_BARE_MICRO_BATCHES = (8192, 32_768)
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
_STEPS = 3
_VOCABULARY = 512  # tokens that every size has
Row = dict[str, Any]


def lengths(size: str) -> Mapping[str, Sequence[int]]:
    """Tokens of each datum, by batch: 32,768 in all, and a thirty-second of that for "tiny"."""
    scale = 32 if size == "tiny" else 1
    uneven = [2048 + 128 * (2 * datum + 1 - TENANTS) for datum in range(TENANTS)]
    made = {"2k": [2048] * 16, "8k": [8192] * 4, "32k": [32_768], UNEVEN: uneven, SHARED: uneven}
    return {name: [length // scale for length in each] for name, each in made.items()}


def main(size: str, folder: str, side: str) -> None:
    model = Path(folder) / "model"
    if not model.exists():
        _make(size, model)
    sides = {TINSMITH: _tinsmith, PEFT: _peft}
    for row in sides[side](size, str(model)):
        print(json.dumps(row), flush=True)


def _make(size: str, model: Path) -> None:
    """Makes the folder `model` at once, from a folder beside it: a side may be killed while it writes."""
    part = model.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shapes.save(size, part, device())
    part.rename(model)
    torch.cuda.empty_cache()


def _tinsmith(size: str, folder: str) -> Iterator[Row]:
    trainer = BareTrainer(_settings(folder), models=1, rank=shapes.RANK)
    for name, each in lengths(size).items():
        if name == SHARED:
            for model in range(1, TENANTS):
                trainer.apply({f"m{model}": Create(LoraSpec(shapes.RANK))})
        ops = _shared(each) if name == SHARED else {"m0": _operation(each)}
        steps = {model: OptimStep(batches.ADAM) for model in ops}
        yield _row(name, partial(trainer.apply, ops, steps))


def _settings(folder: str) -> BaseModelSettings:
    trainer = TrainerSettings(backend="torch", exact=False)
    return BaseModelSettings(name="gpu-check/random", path=folder, dtype="bfloat16", trainer=trainer)


def _shared(each: Sequence[int]) -> dict[str, ForwardBackward]:
    return {f"m{model}": _operation([length]) for model, length in enumerate(each)}


def _operation(each: Sequence[int]) -> ForwardBackward:
    rows = [batches.random_tokens(1, length, _VOCABULARY)[0] for length in each]
    inputs = {
        "target_tokens": Ragged.of([np.roll(row, -1).astype(np.int64) for row in rows], np.int64),
        "weights": Ragged.of([np.ones(len(row), np.float32) for row in rows], np.float32),
    }
    return ForwardBackward(Batch(Ragged.of(rows, np.int32), inputs), batches.LOSS)


def _peft(size: str, folder: str) -> Iterator[Row]:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device())
    config = LoraConfig(r=shapes.RANK, lora_alpha=32, target_modules=_LINEARS)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    adamw = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
    for name, each in lengths(size).items():
        if name in (UNEVEN, SHARED):
            continue
        tokens = torch.from_numpy(batches.random_tokens(len(each), each[0], _VOCABULARY)).long().to(device())
        sizes = {max(1, len(each) * size // 32_768): size for size in _BARE_MICRO_BATCHES}
        steps = {size: partial(_bare_step, model, adamw, torch.split(tokens, rows)) for rows, size in sizes.items()}
        if not (found := _rows(name, steps)):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            found = [row | {"checkpointing": True} for row in _rows(name, steps)]
            model.gradient_checkpointing_disable()
        yield min(found, key=lambda row: min(row["step_s"])) if found else {"batch": name, "failed": "out of memory"}


def _rows(name: str, steps: Mapping[int, Callable[[], object]]) -> list[Row]:
    """The rows of the micro-batches, by tokens, that fit."""
    found = [_row(name, step) | {"micro_batch": tokens} for tokens, step in steps.items()]
    return [row for row in found if "step_s" in row]


def _bare_step(model: Any, adamw: torch.optim.Optimizer, micro_batches: Sequence[torch.Tensor]) -> None:
    for rows in micro_batches:
        (model(input_ids=rows, labels=rows, use_cache=False).loss / len(micro_batches)).backward()
    adamw.step()
    adamw.zero_grad(set_to_none=True)


def _row(name: str, step: Callable[[], object]) -> Row:
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        first, *samples = [timing.timed_ms(partial(_finished, step)) / 1000 for _ in range(_STEPS + 1)]
    except (RuntimeError, MemoryError, UserOpError) as error:
        if not ran_out_of_memory(error) and not isinstance(error, UserOpError):
            raise
        torch.cuda.empty_cache()
        return {"batch": name, "failed": str(error)[:300]}
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {"batch": name, "first_s": first, "step_s": samples, "peak_gib": peak}


def _finished(step: Callable[[], object]) -> None:
    step()
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])

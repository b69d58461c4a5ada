"""Trainer helpers of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from app.domain import losses
from app.domain.ops import AdamParams, OptimStep
from app.domain.results import ForwardBackwardOutput
from app.settings import BaseModelSettings
from tests.parity.reference import Reference
from workers.backends.training import backends
from workers.backends.training.base import BackendOp
from workers.backends.training.trainer import Trainer

LOSSES = tuple(name for name, spec in losses.LOSSES.items() if not spec.critic and name != losses.CUSTOM)
LENGTHS = (23, 7, 40, 2, 31)
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1, grad_clip_norm=5.0))


def open_trainer(
    base: Path,
    dtype: str = "float32",
    *,
    micro_batch_tokens: int = 64,
    checkpointing: bool = False,
    zero_stage: int | None = None,
) -> Trainer:
    """Opens a trainer of plain torch, or with `zero_stage` one of DeepSpeed."""
    torch.set_num_threads(1)
    settings = {
        "micro_batch_tokens": micro_batch_tokens,
        "activation_checkpointing": checkpointing,
        **({"backend": "torch"} if zero_stage is None else {"backend": "deepspeed", "zero_stage": zero_stage}),
    }
    trainer = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype=dtype, trainer=settings))
    trainer.open()
    return trainer


def apply(trainer: Trainer, model: str, op: BackendOp) -> Any:
    return trainer.apply({model: op})[model]


def run(trainer: Trainer, model: str, op: BackendOp) -> ForwardBackwardOutput:
    """Runs a forward_backward that must not fail."""
    output = apply(trainer, model, op)
    assert isinstance(output, ForwardBackwardOutput), output
    return output


def reference_of(
    trainer: Trainer, model: str, base: Path, folder: Path, dtype: torch.dtype = torch.float32
) -> Reference:
    """Reference of the current `model`, from the PEFT files that the trainer saves."""
    folder.mkdir()
    trainer.capture(model, optimizer=False)(folder)
    return Reference(base, folder, dtype)


def state(trainer: Trainer, model: str, folder: Path) -> dict[str, bytes]:
    """Adapter, optimizer state and pending gradient, to the bit."""
    folder.mkdir()
    trainer.capture(model, optimizer=True)(folder)
    pending = {name: gradient.tobytes() for name, gradient in trainer.gradients(model).items()}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | pending

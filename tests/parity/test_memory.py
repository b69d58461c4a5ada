"""Recomputed layers save memory and change no bit of a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

LENGTHS = (23, 7, 40, 2, 31, 60, 60)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


def opened(base: Path, dtype: str = "float32", **trainer: Any) -> Trainer:
    """Opens a trainer with two models, of different adapters, one step from their start."""
    torch.set_num_threads(1)
    trainer = {"backend": "torch", "micro_batch_tokens": 128, **trainer}
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype=dtype, trainer=trainer))
    backend.open()
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1)), "b": Create(LoraSpec(rank=8, seed=2, train_mlp=False))})
    both(backend, 0)
    step = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))
    backend.apply({"a": step, "b": step})
    return backend


def both(backend: Trainer, seed: int) -> dict[str, np.ndarray]:
    """A pass over both models: their outputs and their gradients."""
    ops = {
        model: ForwardBackward(batch(supervised(seed + i, LENGTHS)), "cross_entropy")
        for i, model in enumerate(("a", "b"))
    }
    found = {f"{model} logprobs": output.logprobs.values for model, output in backend.apply(ops).items()}
    for model in ops:
        found |= {f"{model} {name}": gradient for name, gradient in backend.gradients(model).items()}
    return found


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Bytes that autograd keeps from a forward for its backward.

    They are counted tensor by tensor, with each storage counted once.
    """
    kept: list[int] = []
    seen: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize(
    "trainer", [{"backend": "torch"}, {"backend": "deepspeed", "zero_stage": 3}], ids=["torch", "zero-3"]
)
def test_layers_computed_again_give_the_same_gradients_from_less_memory(base: Path, trainer: dict[str, Any]) -> None:
    whole, again = (opened(base, **trainer, activation_checkpointing=flag) for flag in (False, True))
    with kept_bytes() as usual:
        wanted = both(whole, 5)
    with kept_bytes() as less:
        found = both(again, 5)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    # Weights are kept in any case, by reference.
    weights = sum(parameter.untyped_storage().nbytes() for parameter in whole._engine.base.model.parameters())
    assert sum(less) - weights < (sum(usual) - weights) / 3

"""Eight tenants with eight LoRA ranks in one pass, each with its own loss, against each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import ForwardBackwardOutput
from tests.parity.datums import batch, data, supervised
from tests.parity.reference import relative_error
from tests.parity.training import LOSSES, apply, run, state
from workers.backends.training.base import ADAPTER_FILE, OPTIMIZER_FILE
from workers.backends.training.trainer import Trainer

# The adapters' targets differ too. Eight adapters on 2 x 7 + 1 linear layers.
SPECS = [
    LoraSpec(rank, train_mlp=i % 3 != 1, train_unembed=i % 2 == 0, seed=i)
    for i, rank in enumerate((1, 2, 3, 4, 8, 16, 24, 32))
]
TENANT_LOSSES = (*LOSSES, "ppo", "cross_entropy")[: len(SPECS)]
# After a step that differs in rounding, because Adam divides small gradients by their own size.
BOUND = (1e-5, 1e-4)
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8, grad_clip_norm=1.0))


def ops(turn: int) -> list[ForwardBackward]:
    """Ops with lengths that interleave when sorted, and two tenants with only one datum.

    No datum has only two or three tokens: there the gradient of a q_proj is almost zero, and rounding is a part of it.
    """
    lengths = [tuple(5 + (5 * i + 11 * j + turn) % 37 for j in range(1 + i % 4)) for i in range(len(SPECS))]
    batches = [batch(data(name, 10 * turn + i, lengths[i])) for i, name in enumerate(TENANT_LOSSES)]
    return [ForwardBackward(b, name) for b, name in zip(batches, TENANT_LOSSES, strict=True)]


def test_eight_tenants_in_one_pass_are_each_as_if_alone(
    trainer: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    alone, together = [create(spec) for spec in SPECS], [create(spec) for spec in SPECS]
    bystander = create()
    run(trainer, bystander, ForwardBackward(batch(supervised(3, (9, 4))), "cross_entropy"))
    untouched = state(trainer, bystander, tmp_path / "before")
    for turn in range(2):
        wanted = [run(trainer, model, op) for model, op in zip(alone, ops(turn), strict=True)]
        # In reverse order, so that no tenant's place in the pass equals its number.
        found = trainer.apply(dict(reversed(list(zip(together, ops(turn), strict=True)))))
        for i, model in enumerate(together):
            same(found[model], wanted[i])
            error = relative_error(trainer.gradients(model), trainer.gradients(alone[i]))
            assert error < BOUND[turn], f"turn {turn}, rank {SPECS[i].rank}"
        for model in alone:
            apply(trainer, model, STEP)
        trainer.apply(dict.fromkeys(together, STEP))
    for i, (one, other) in enumerate(zip(alone, together, strict=True)):
        mine, theirs = (tensors(trainer, model, tmp_path / model) for model in (one, other))
        assert relative_error(theirs, mine) < 1e-4, f"rank {SPECS[i].rank}"
    assert state(trainer, bystander, tmp_path / "after") == untouched


def same(found: object, wanted: ForwardBackwardOutput) -> None:
    assert isinstance(found, ForwardBackwardOutput), found
    np.testing.assert_allclose(found.logprobs.values, wanted.logprobs.values, rtol=0, atol=1e-4)
    # Tokens of either sign may cancel in a sum, so rounding is measured relative to all absolute losses.
    scale = float(np.abs(wanted.logprobs.values).sum())
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-5 * scale)


def tensors(trainer: Trainer, model: str, folder: Path) -> dict[str, np.ndarray]:
    """Weights and optimizer state."""
    folder.mkdir()
    trainer.capture(model, optimizer=True)(folder)
    return {**load_file(folder / ADAPTER_FILE), **load_file(folder / OPTIMIZER_FILE)}

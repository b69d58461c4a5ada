"""A base model in bfloat16 under fp32 adapters, against the same base model in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.ops import DropGradients, ForwardBackward, LoraSpec
from tests.parity.datums import Datum, batch, data, supervised
from tests.parity.reference import Reference, relative_error
from tests.parity.rounding import MANY_LENGTHS, Found, check_rounding
from tests.parity.training import LENGTHS, LOSSES, STEP, apply, open_trainer, reference_of, run
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer


@pytest.fixture(scope="module")
def rounded(base: Path) -> Trainer:
    trainer = open_trainer(base, "bfloat16")
    apply(trainer, "m", Create(LoraSpec(rank=4, seed=1)))
    apply(trainer, "m", ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy"))
    apply(trainer, "m", STEP)
    return trainer


def gradients(trainer: Trainer, *requests: list[Datum]) -> dict[str, np.ndarray]:
    """Gradients accumulated over these requests."""
    apply(trainer, "m", DropGradients())
    for datums in requests:
        run(trainer, "m", ForwardBackward(batch(datums), "cross_entropy"))
    return trainer.gradients("m")


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_bfloat16_is_as_near_to_fp32_as_transformers_itself(
    rounded: Trainer, base: Path, tmp_path: Path, loss_fn: str
) -> None:
    apply(rounded, "m", DropGradients())
    exact = reference_of(rounded, "m", base, tmp_path / "peft")
    theirs = Reference(base, tmp_path / "peft", torch.bfloat16)
    datums = data(loss_fn, 9, MANY_LENGTHS)
    output = run(rounded, "m", ForwardBackward(batch(datums), loss_fn))
    assert output.logprobs.values.dtype == np.float32
    found = Found(list(output.logprobs), output.metrics["loss:sum"], rounded.gradients("m"))
    check_rounding(found, exact, theirs, datums, loss_fn)


def test_gradients_add_up_in_fp32(rounded: Trainer) -> None:
    """A sum in bfloat16 would lose 2^-9 = 0.002 at every request."""
    requests = [supervised(seed, LENGTHS) for seed in (1, 2, 3)]
    alone = [gradients(rounded, datums) for datums in requests]
    wanted = {name: sum(found[name].astype(np.float64) for found in alone) for name in alone[0]}
    assert relative_error(gradients(rounded, *requests), wanted) < 1e-6

"""A base model in bfloat16 under fp32 adapters, against the same base model in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from app.domain.ops import DropGradients, ForwardBackward, LoraSpec
from tests.parity.datums import Datum, batch, data, supervised
from tests.parity.reference import Reference, relative_error
from tests.parity.rounding import MANY_LENGTHS, Found, check_rounding
from tests.parity.training import LENGTHS, LOSSES, STEP, apply, open_trainer, reference_of, run
from workers.backends.training.base import ADAPTER_FILE, Create
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


def test_a_copy_for_a_sampler_has_the_adapter_as_passes_round_it(rounded: Trainer, tmp_path: Path) -> None:
    written = []
    for name, is_rounded in (("masters", False), ("copy", True)):
        (tmp_path / name).mkdir()
        write = rounded.capture("m", optimizer=False, rounded=is_rounded)
        write(tmp_path / name)
        written.append(load_file(tmp_path / name / ADAPTER_FILE))
        assert write.size == pytest.approx(sum(tensor.nbytes for tensor in written[-1].values()), rel=0.1)
    masters, copy = written
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert masters.keys() == copy.keys()
    assert all(torch.equal(copy[name], tensor.bfloat16()) for name, tensor in masters.items())

"""The numbers of a DeepSpeed trainer at each ZeRO stage against transformers + PEFT + torch.optim.AdamW.

The other files here compare plain torch's, and tests/conformance two ranks with one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from app.domain.ops import ForwardBackward, LoraSpec
from tests import packed_checkpoints
from tests.parity import architectures
from tests.parity.datums import batch, data, supervised
from tests.parity.reference import Reference, relative_error
from tests.parity.training import LENGTHS, LOSSES, STEP, apply, open_trainer, reference_of, run
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer


@pytest.fixture(scope="module", params=range(4))
def trainer(request: pytest.FixtureRequest, base: Path) -> Trainer:
    trainer = open_trainer(base, zero_stage=request.param)
    described = trainer.describe()
    assert (described["trainer"], described["zero_stage"]) == ("DeepSpeedEngine", request.param)
    return trainer


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_gradients_and_metrics_equal_the_reference(
    trainer: Trainer, model: str, reference: Reference, loss_fn: str
) -> None:
    datums = data(loss_fn, 9, LENGTHS)
    found = run(trainer, model, ForwardBackward(batch(datums), loss_fn, {"entropy": 1.0})).metrics
    wanted = reference.backward(datums, loss_fn)
    assert abs(found["loss:sum"] - wanted) < 1e-5 * reference.size(datums, loss_fn)
    assert relative_error(trainer.gradients(model), reference.gradients()) < 1e-5
    assert found == pytest.approx(reference.metrics(datums, loss_fn), rel=1e-5, abs=1e-4)


def test_three_steps_stay_with_the_reference(
    trainer: Trainer, create: Callable[..., str], base: Path, tmp_path: Path
) -> None:
    """Weights differ by less than a thousandth of their movement."""
    model = create(steps=0)
    twin = reference_of(trainer, model, base, tmp_path / "start")
    start = twin.weights()
    for seed in range(3):
        datums = supervised(seed, LENGTHS)
        run(trainer, model, ForwardBackward(batch(datums), "cross_entropy"))
        twin.backward(datums, "cross_entropy")
        norm = apply(trainer, model, STEP).metrics["grad_norm"]
        assert norm == pytest.approx(twin.step(asdict(STEP.params)), rel=1e-3)
    ends = (reference_of(trainer, model, base, tmp_path / "end").weights(), twin.weights())
    assert relative_error(*({name: end[name] - start[name] for name in start} for end in ends)) < 1e-3


@pytest.mark.parametrize("stage", range(4))
def test_a_base_published_in_mxfp4_trains_as_its_numbers_do(stage: int, tmp_path: Path) -> None:
    """DeepSpeed views parameters as bytes, which must be contiguous."""
    plain = architectures.build("gpt-oss", tmp_path / "plain")
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    stored = load_file(plain / "model.safetensors") | packed_checkpoints.mxfp4(packed)
    numbers = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    step = ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy")
    found, wanted = (open_trainer(packed, zero_stage=stage), open_trainer(plain))
    for trainer in (found, wanted):
        apply(trainer, "m", Create(LoraSpec(rank=4, seed=1)))
    losses = [run(trainer, "m", step).metrics["loss:sum"] for trainer in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert relative_error(found.gradients("m"), wanted.gradients("m")) < 1e-5

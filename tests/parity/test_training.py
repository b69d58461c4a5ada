"""A trainer's numbers against transformers + PEFT + torch.optim.AdamW, from the PEFT files it saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity.datums import Datum, batch, policy, supervised
from tests.parity.reference import Reference, relative_error
from workers.training import factory
from workers.training.base import Create
from workers.training.trainer import LoraTrainer

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
LENGTHS = (23, 7, 40, 2, 31)
STEP = AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1, grad_clip_norm=5.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trainer(base: Path) -> Iterator[LoraTrainer]:
    torch.set_num_threads(1)
    settings = BaseModelSettings(
        name="tiny", path=str(base), dtype="float32", trainer={"backend": "torch", "micro_batch_tokens": 64}
    )
    trainer = factory.create(settings)
    trainer.open()
    yield trainer


@pytest.fixture
def model(trainer: LoraTrainer) -> Iterator[str]:
    """A model some steps away from its start, where B is zero and half of the gradient with it."""
    trainer.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    for seed in range(2):
        train(trainer, supervised(seed, LENGTHS), "cross_entropy")
    yield "m"
    trainer.close("m")


def train(trainer: LoraTrainer, datums: list[Datum], loss_fn: str) -> None:
    trainer.apply({"m": ForwardBackward(batch(datums), loss_fn)})
    trainer.apply({"m": OptimStep(STEP)})


def data(loss_fn: str, seed: int) -> list[Datum]:
    return supervised(seed, LENGTHS) if loss_fn == "cross_entropy" else policy(seed, LENGTHS)


def reference(trainer: LoraTrainer, base: Path, folder: Path) -> Reference:
    folder.mkdir()
    trainer.save("m", folder, optimizer=False)
    return Reference(base, folder)


@pytest.mark.parametrize("width", [0, 3])
def test_forward_logprobs_equal_the_reference(
    trainer: LoraTrainer, model: str, base: Path, tmp_path: Path, width: int
) -> None:
    datums = supervised(9, LENGTHS, width)
    expected = reference(trainer, base, tmp_path / "peft").forward(datums)
    output = trainer.apply({model: ForwardBackward(batch(datums), "cross_entropy", forward_only=True)})[model]
    for found, wanted in zip(output.logprobs, expected, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("loss_fn", "width"), [*((name, 0) for name in LOSSES), ("cross_entropy", 3)])
def test_losses_and_gradients_equal_the_reference(
    trainer: LoraTrainer, model: str, base: Path, tmp_path: Path, loss_fn: str, width: int
) -> None:
    datums = supervised(9, LENGTHS, width) if width else data(loss_fn, 9)
    expected = reference(trainer, base, tmp_path / "peft")
    wanted = expected.backward(datums, loss_fn)
    output = trainer.apply({model: ForwardBackward(batch(datums), loss_fn)})[model]
    assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
    assert relative_error(trainer.gradients(model), expected.gradients()) < 1e-5


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "dro"])
def test_loss_settings_reach_the_formula(
    trainer: LoraTrainer, model: str, base: Path, tmp_path: Path, loss_fn: str
) -> None:
    config = {"beta": 0.7} if loss_fn == "dro" else {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0}
    datums = data(loss_fn, 9)
    wanted = reference(trainer, base, tmp_path / "peft").backward(datums, loss_fn, config)
    output = trainer.apply({model: ForwardBackward(batch(datums), loss_fn, config)})[model]
    assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_four_steps_stay_with_the_reference(trainer: LoraTrainer, base: Path, tmp_path: Path, loss_fn: str) -> None:
    trainer.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    expected = reference(trainer, base, tmp_path / "peft")
    for seed in range(4):
        datums = data(loss_fn, seed)
        train(trainer, datums, loss_fn)
        expected.backward(datums, loss_fn)
        expected.step(asdict(STEP))
    probe = supervised(99, LENGTHS)
    before = Reference(base, tmp_path / "peft").forward(probe)
    wanted = expected.forward(probe)
    output = trainer.apply({"m": ForwardBackward(batch(probe), "cross_entropy", forward_only=True)})["m"]
    for found, then, start in zip(output.logprobs, wanted, before, strict=True):
        assert np.abs(then - start).max() > 0.05, "the steps moved nothing, so this compares nothing"
        np.testing.assert_allclose(found, then, rtol=0, atol=1e-3)

"""The service's numbers against the reference, from weights exported over HTTP. Nothing of workers/ is imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from app.domain import losses
from tests.contract.data import logprobs, train
from tests.contract.stack import Stack, download_model
from tests.parity import datums as made
from tests.parity.datums import Datum
from tests.parity.reference import Reference, relative_error

LENGTHS = (23, 7, 40, 2, 31)
LOSSES = tuple(name for name, spec in losses.LOSSES.items() if not spec.critic and name != losses.CUSTOM)
STEP = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip_norm": 5.0,
}

# With both betas 0 a step moves by lr * g / (|g| + eps): ten times the gradient as long as it is far below eps.
GRADIENT_STEP = {**STEP, "learning_rate": 1e6, "beta1": 0.0, "beta2": 0.0, "eps": 1e5, "weight_decay": 0.0}
GRADIENT_STEP["grad_clip_norm"] = 0.0


def data(loss_fn: str, seed: int) -> list[Datum]:
    return made.data(loss_fn, seed, LENGTHS)


def for_sdk(rows: list[Datum]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row["tokens"].tolist()),
            loss_fn_inputs={name: value for name, value in row.items() if name != "tokens"},
        )
        for row in rows
    ]


def reference(training: tinker.TrainingClient, stack: Stack, folder: Path, name: str) -> Reference:
    """Reference from the current model, downloaded as PEFT files."""
    folder.mkdir()
    return Reference(stack.base_path, download_model(training, stack, folder, name))


def weights(model: Reference) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.parameters.items()}


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_logprobs_losses_and_gradients_equal_the_reference(
    training: tinker.TrainingClient, stack: Stack, tmp_path: Path, loss_fn: str
):
    train(training, 2)  # B starts at zero, and half of the gradient with it
    twin = reference(training, stack, tmp_path / "before", "before")
    probe = data("cross_entropy", 99)
    found = logprobs(training.forward(for_sdk(probe), "cross_entropy").result())
    expected = np.concatenate([row.ravel() for row in twin.forward(probe)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

    before = weights(twin)
    rows = data(loss_fn, 3)
    size = twin.size(rows, loss_fn)
    output = training.forward_backward(for_sdk(rows), loss_fn).result()
    assert abs(output.metrics["loss:sum"] - twin.backward(rows, loss_fn)) < 1e-5 * size
    training.optim_step(types.AdamParams(**GRADIENT_STEP)).result()
    twin.step(GRADIENT_STEP)
    after = weights(reference(training, stack, tmp_path / "after", "after"))
    moved, expected_moves = (
        {name: end[name] - start for name, start in before.items()} for end in (after, weights(twin))
    )
    assert relative_error(moved, expected_moves) < 1e-5


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
def test_four_whole_steps_equal_the_reference(
    training: tinker.TrainingClient, stack: Stack, tmp_path: Path, loss_fn: str
):
    check_steps(training, stack, tmp_path, loss_fn)


# Each loss has its gradient on both stacks above, and a step is the same after any.
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
@pytest.mark.parametrize("stack", ["deepspeed-2-ranks-vllm"], indirect=True)
def test_four_whole_steps_of_two_ranks_equal_the_reference(
    training: tinker.TrainingClient, stack: Stack, tmp_path: Path, loss_fn: str
):
    check_steps(training, stack, tmp_path, loss_fn)


def check_steps(training: tinker.TrainingClient, stack: Stack, folder: Path, loss_fn: str) -> None:
    twin = reference(training, stack, folder / "start", "start")
    for seed in range(4):
        rows = data(loss_fn, seed)
        training.forward_backward(for_sdk(rows), loss_fn)
        training.optim_step(types.AdamParams(**STEP)).result()
        twin.backward(rows, loss_fn)
        twin.step(STEP)
    probe = data("cross_entropy", 99)
    found = logprobs(training.forward(for_sdk(probe), "cross_entropy").result())
    expected = np.concatenate([row.ravel() for row in twin.forward(probe)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)

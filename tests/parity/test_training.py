"""A trainer's numbers against transformers + PEFT + torch.optim.AdamW, from the PEFT files it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from app.domain.ops import AdamParams, ForwardBackward, OptimStep
from app.errors import UserOpError
from tests.parity.datums import Datum, batch, data, policy, sequences, supervised, thresholds
from tests.parity.reference import Reference, relative_error
from tests.parity.training import LENGTHS, LOSSES, apply, reference_of, run, state
from workers.backends.training.trainer import Trainer

CLIPPED = ("ppo", "cispo", "gspo")
TOKEN_RANGE = {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0}
SEQUENCE_RANGE = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
UNWEIGHTED = [{k: v for k, v in datum.items() if k != "weights"} for datum in supervised(9, LENGTHS)]
# Every loss, and each form of its inputs.
CASES: dict[str, tuple[str, list[Datum], dict[str, float]]] = {
    **{loss_fn: (loss_fn, data(loss_fn, 9, LENGTHS), {}) for loss_fn in LOSSES},
    "cross_entropy of [N, 3]": ("cross_entropy", supervised(9, LENGTHS, width=3), {}),
    "cross_entropy without weights": ("cross_entropy", UNWEIGHTED, {}),
    "dro with its own beta": ("dro", policy(9, LENGTHS), {"beta": 0.7}),
    "ppo with its own range": ("ppo", policy(9, LENGTHS), TOKEN_RANGE),
    "cispo with its own range": ("cispo", policy(9, LENGTHS), TOKEN_RANGE),
    "gspo with its own range": ("gspo", sequences(9, LENGTHS), SEQUENCE_RANGE),
    **{
        f"{loss_fn} with a range a token": (loss_fn, thresholds(9, data(loss_fn, 9, LENGTHS)), {})
        for loss_fn in CLIPPED
    },
}


@pytest.mark.parametrize("width", [0, 3])
def test_forward_logprobs_equal_the_reference(trainer: Trainer, model: str, reference: Reference, width: int) -> None:
    datums = supervised(9, LENGTHS, width)
    output = run(trainer, model, ForwardBackward(batch(datums), "cross_entropy", forward_only=True))
    for found, wanted in zip(output.logprobs, reference.forward(datums), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_metrics_equal_the_reference(
    trainer: Trainer, model: str, reference: Reference, case: str
) -> None:
    loss_fn, datums, config = CASES[case]
    found = run(trainer, model, ForwardBackward(batch(datums), loss_fn, {**config, "entropy": 1.0})).metrics
    wanted = reference.backward(datums, loss_fn, config)
    assert abs(found["loss:sum"] - wanted) < 1e-5 * reference.size(datums, loss_fn, config)
    assert relative_error(trainer.gradients(model), reference.gradients()) < 1e-5
    assert found == pytest.approx(reference.metrics(datums, loss_fn, config), rel=1e-5, abs=1e-4)


def test_the_clip_ranges_above_clip_some_tokens_and_leave_others(reference: Reference) -> None:
    for case, (loss_fn, datums, config) in CASES.items():
        if loss_fn in CLIPPED and case != "gspo":
            metrics = reference.metrics(datums, loss_fn, config)
            assert 0 < metrics["clipped:sum"] < metrics["loss_tokens:sum"], case


def test_entropy_is_there_only_when_asked_for(trainer: Trainer, model: str) -> None:
    op = ForwardBackward(batch(data("ppo", 9, LENGTHS)), "ppo", {"entropy": 0.0})
    assert "entropy:sum" not in run(trainer, model, op).metrics


# Adam divides a gradient by its own size: rounding in one that is next to zero moves a weight as far as any. How far
# depends on the processor where eps is about as large as such rounding, as 1e-8 is where gradients are clipped: there
# PyTorch's own fp32 is 4e-4 from fp64. 1e-12 is far below it, and fp32 is within a tenth of the bound.
STEPS: dict[str, AdamParams] = {
    "plain": AdamParams(learning_rate=1e-2, eps=1e-8),
    "weight decay": AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.3),
    "clipping": AdamParams(learning_rate=1e-2, eps=1e-12, grad_clip_norm=1e-2),
}
BOUND = 1e-3


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_five_steps_stay_with_the_reference(
    trainer: Trainer, create: Callable[..., str], base: Path, tmp_path: Path, loss_fn: str, steps: str
) -> None:
    """After five steps weights differ by less than BOUND of their movement; grad and parameter norms are equal."""
    model, params = create(steps=0), STEPS[steps]
    twin = reference_of(trainer, model, base, tmp_path / "start")
    start = twin.weights()
    for seed in range(5):
        datums = data(loss_fn, seed, (9, 2, 14))
        run(trainer, model, ForwardBackward(batch(datums), loss_fn))
        found = apply(trainer, model, OptimStep(params)).metrics
        twin.backward(datums, loss_fn)
        norm = twin.step(asdict(params))
        assert params.grad_clip_norm == 0 or norm > params.grad_clip_norm, "nothing was clipped"
        assert found["grad_norm"] == pytest.approx(norm, rel=BOUND)
        assert found["param_norm"] == pytest.approx(twin.norm(), rel=1e-5)
        assert found["learning_rate"] == params.learning_rate
    wanted = twin.weights()
    ours = reference_of(trainer, model, base, tmp_path / "end").weights()
    moved, wanted_moves = ({name: end[name] - start[name] for name in start} for end in (ours, wanted))
    assert relative_error(moved, wanted_moves) < BOUND


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("loss_fn", LOSSES[1:])
def test_an_infinite_ratio_fails_by_datum_and_leaves_the_state_bit_identical(
    trainer: Trainer, model: str, tmp_path: Path, loss_fn: str, forward_only: bool
) -> None:
    run(trainer, model, ForwardBackward(batch(supervised(3, LENGTHS)), "cross_entropy"))
    before = state(trainer, model, tmp_path / "before")
    datums = data(loss_fn, 9, LENGTHS)
    datums[2]["logprobs"][-1] = -1e4
    error = apply(trainer, model, ForwardBackward(batch(datums), loss_fn, forward_only=forward_only))
    assert isinstance(error, UserOpError)
    assert error.category == "user"
    assert str(error).startswith("datum 2: its ")
    assert state(trainer, model, tmp_path / "after") == before

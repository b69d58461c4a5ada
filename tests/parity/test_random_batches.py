"""Random batches of every loss against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from app.domain.ops import DropGradients, ForwardBackward, LoraSpec
from tests.parity.datums import Datum, batch, supervised
from tests.parity.reference import Reference
from tests.parity.training import LENGTHS, LOSSES, STEP, apply, reference_of, run
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

# Below its smallest normal number, which weights drawn near it reach, fp32 has no relative precision.
FLOOR = float(np.finfo(np.float32).tiny)
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


def numbers(shape: tuple[int, ...], low: float, high: float) -> st.SearchStrategy[np.ndarray]:
    """fp32 numbers, often 0 if that is within the range."""
    return arrays(np.float32, shape, elements=st.floats(low, high, width=32), fill=None)


@st.composite
def datum(draw: st.DrawFn, loss_fn: str, width: int, optional: frozenset[str]) -> Datum:
    n = draw(st.integers(1, 24))
    shape = (n, width) if width else (n,)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    found: Datum = {"tokens": rng.integers(0, 320, n, dtype=np.int32), "target_tokens": rng.integers(0, 320, shape)}
    if loss_fn == "cross_entropy":
        return {**found, "weights": draw(numbers(shape, -4, 4))} if "weights" in optional else found
    found |= {"logprobs": draw(numbers(shape, -9, 0)), "advantages": draw(numbers(shape, -4, 4))}
    if loss_fn == "gspo":
        mask = draw(arrays(np.float32, shape, elements=st.sampled_from([0.0, 1.0, -0.5])))
        mask[draw(st.integers(0, n - 1))] = 1.0
        found["sequence_ratio_mask"] = mask
    if "clip_low_threshold" in optional:
        found["clip_low_threshold"] = draw(numbers(shape, 0, 0.75))
    if "clip_high_threshold" in optional:
        found["clip_high_threshold"] = draw(numbers(shape, 0.875, 3))
    return found


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, list[Datum], dict[str, float]]:
    loss_fn = draw(st.sampled_from(LOSSES))
    width = draw(st.integers(0, 3)) if loss_fn == "cross_entropy" else 0
    known = {"cross_entropy": ["weights"], "ppo": THRESHOLDS, "cispo": THRESHOLDS, "gspo": THRESHOLDS}.get(loss_fn, [])
    optional = frozenset(draw(st.sets(st.sampled_from(known)))) if known else frozenset[str]()
    config = {"beta": draw(st.floats(0, 2, width=32))} if loss_fn == "dro" else {}
    if known == THRESHOLDS:
        config = {"clip_low_threshold": draw(st.floats(0, 0.75)), "clip_high_threshold": draw(st.floats(0.875, 3))}
    return loss_fn, draw(st.lists(datum(loss_fn, width, optional), min_size=1, max_size=5)), config


@pytest.fixture(scope="module")
def twins(
    trainer: Trainer, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Trainer, Reference]]:
    apply(trainer, "random", Create(LoraSpec(rank=4, seed=1)))
    apply(trainer, "random", ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy"))
    apply(trainer, "random", STEP)
    yield trainer, reference_of(trainer, "random", base, tmp_path_factory.mktemp("random") / "peft", torch.float64)
    trainer.close("random")


# Never derandomized: each run searches different cases, and a failure prints a line that repeats it.
@settings(
    max_examples=40,
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(request=requests())
def test_any_batch_equals_the_reference(twins: tuple[Trainer, Reference], request: Any) -> None:
    """Loss and gradient are within 1e-5 of the datums' own sizes, because datums of either sign may cancel.

    The reference computes in fp64: if dro's square is of almost equal logprobs, two fp32 models differ by more.
    """
    trainer, reference = twins
    loss_fn, datums, config = request
    output = run(trainer, "random", ForwardBackward(batch(datums), loss_fn, config))
    found = trainer.gradients("random")
    apply(trainer, "random", DropGradients())
    logprobs = list(output.logprobs)
    for mine, theirs in zip(logprobs, reference.forward(datums), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    # An fp32 reference also has its logprobs' rounding there, so dro is taken at the logprobs just checked.
    at = logprobs if loss_fn == "dro" else None
    loss = reference.backward(datums, loss_fn, config, at)
    wanted = reference.take_gradients()
    assert abs(output.metrics["loss:sum"] - loss) <= 1e-5 * reference.size(datums, loss_fn, config) + FLOOR
    size = 0.0
    for i, one in enumerate(datums):
        reference.backward([one], loss_fn, config, at and at[i : i + 1])
        size += length(reference.take_gradients())
    assert length({name: found[name] - wanted[name] for name in wanted}) <= 1e-5 * size + FLOOR


def length(gradients: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())))

"""A critic's numbers against PEFT on transformers' sequence classifier, from the PEFT files that the trainer saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.proto.response_conv import deserialize_forward_backward_output
from torch.utils._python_dispatch import TorchDispatchMode

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import CriticOutput
from app.errors import UserOpError
from app.wire.results import encode_forward_backward
from tests.models import VOCAB_SIZE
from tests.parity import architectures
from tests.parity.datums import Datum, batch, supervised, valued
from tests.parity.reference import CriticReference, relative_error
from tests.parity.rounding import MANY_LENGTHS, Found, check_rounding
from tests.parity.test_random_batches import FLOOR, length
from tests.parity.training import LENGTHS, STEP, apply, open_trainer, state
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

SPEC = LoraSpec(rank=4, seed=1)
CASES: dict[str, dict[str, float]] = {
    "default clip": {},
    "tight clip": {"value_clip": 0.05},
    "no clip": {"value_clip": 1e9},
}
_numbers = count()


@pytest.fixture
def create(trainer: Trainer) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def make(spec: LoraSpec = SPEC, steps: int = 2) -> str:
        """Makes a critic some steps from its start."""
        made.append(f"critic-{next(_numbers)}")
        apply(trainer, made[-1], Create(spec, critic=True))
        for seed in range(steps):
            run(trainer, made[-1], valued(seed, LENGTHS))
            apply(trainer, made[-1], STEP)
        return made[-1]

    yield make
    for model in made:
        trainer.close(model)


def op(datums: list[Datum], **config: float) -> ForwardBackward:
    return ForwardBackward(batch(datums), "ppo_critic", config)


def run(trainer: Trainer, model: str, datums: list[Datum], **config: float) -> CriticOutput:
    output = apply(trainer, model, op(datums, **config))
    assert isinstance(output, CriticOutput), output
    return output


def reference_of(
    trainer: Trainer, model: str, base: Path, folder: Path, dtype: torch.dtype = torch.float32
) -> CriticReference:
    folder.mkdir()
    trainer.capture(model, optimizer=False)(folder)
    return CriticReference(base, folder, dtype)


def test_values_are_those_of_a_sequence_classifier_loaded_with_peft(
    trainer: Trainer, create: Callable[..., str], base: Path, tmp_path: Path
) -> None:
    model = create()
    twin = reference_of(trainer, model, base, tmp_path / "peft")
    datums = valued(9, LENGTHS)
    output = run(trainer, model, datums)
    for found, wanted in zip(output.values, twin.forward(datums), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, np.float32)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    first = next(iter(output.values))
    for end in (1, 8, len(first)):
        assert twin.pooled(datums[0]["tokens"][:end]) == pytest.approx(first[end - 1], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_metrics_equal_the_reference(
    trainer: Trainer, create: Callable[..., str], base: Path, tmp_path: Path, case: str
) -> None:
    model, datums = create(), valued(9, LENGTHS)
    twin = reference_of(trainer, model, base, tmp_path / "peft")
    found = run(trainer, model, datums, **CASES[case]).metrics
    wanted = twin.backward(datums, "ppo_critic", CASES[case])
    assert abs(found["loss:sum"] - wanted) < 1e-5 * twin.size(datums, "ppo_critic", CASES[case])
    gradients = trainer.gradients(model)
    assert "base_model.model.score.weight" in gradients
    assert relative_error(gradients, twin.gradients()) < 1e-5
    assert found == pytest.approx(twin.metrics(datums, "ppo_critic", CASES[case]), rel=1e-5, abs=1e-5)
    assert case != "default clip" or 0 < found["clipped:sum"] < found["loss_tokens:sum"]


# Bound and eps as in test_training.py.
BOUND = 1e-3


@pytest.mark.parametrize("clip", [0.0, 1e-2])
def test_five_steps_stay_with_the_reference(
    trainer: Trainer, create: Callable[..., str], base: Path, tmp_path: Path, clip: float
) -> None:
    model, params = create(steps=0), AdamParams(learning_rate=1e-2, eps=1e-12, grad_clip_norm=clip)
    twin = reference_of(trainer, model, base, tmp_path / "start")
    start = twin.weights()
    for seed in range(5):
        datums = valued(seed, (9, 4, 14))
        run(trainer, model, datums)
        twin.backward(datums, "ppo_critic")
        norm = twin.step(asdict(params))
        found = apply(trainer, model, OptimStep(params)).metrics
        assert found["grad_norm"] == pytest.approx(norm, rel=BOUND)
        assert found["param_norm"] == pytest.approx(twin.norm(), rel=1e-5)
    ours = reference_of(trainer, model, base, tmp_path / "end").weights()
    moved, wanted = ({name: end[name] - start[name] for name in start} for end in (ours, twin.weights()))
    assert relative_error(moved, wanted) < BOUND


def test_chunks_merged_by_the_sdk_equal_the_whole(trainer: Trainer, create: Callable[..., str]) -> None:
    whole, parts = create(), create()
    datums = valued(4, (*LENGTHS, 1))

    def read(model: str, some: list[Datum]):
        return deserialize_forward_backward_output(encode_forward_backward(run(trainer, model, some)))

    wanted = read(whole, datums)
    found = combine_fwd_bwd_output_results([read(parts, datums[i : i + 2]) for i in (0, 2, 4)])
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-5)
    assert relative_error(trainer.gradients(parts), trainer.gradients(whole)) < 1e-5
    for one, same in zip(found.loss_fn_outputs, wanted.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["values"].to_numpy(), same["values"].to_numpy(), rtol=0, atol=1e-5)


def test_critics_in_one_pass_beside_policies_are_each_as_if_alone(trainer: Trainer, create: Callable[..., str]) -> None:
    specs = [LoraSpec(rank, train_mlp=rank != 2, seed=rank) for rank in (1, 2, 8)]
    alone, together = [create(spec) for spec in specs], [create(spec) for spec in specs]
    ops = [op(valued(i, tuple(5 + (7 * i + 11 * j) % 37 for j in range(3)))) for i in range(len(specs))]
    wanted = [apply(trainer, model, one) for model, one in zip(alone, ops, strict=True)]
    for policy in ("p", "q"):
        apply(trainer, policy, Create(SPEC))
    supervise = ForwardBackward(batch(supervised(5, LENGTHS)), "cross_entropy")
    lone = apply(trainer, "q", supervise)
    found = trainer.apply({together[0]: ops[0], "p": supervise, **dict(zip(together[1:], ops[1:], strict=True))})
    assert found["p"].logprobs.values.tobytes() == lone.logprobs.values.tobytes(), "no part of the critics' pass"
    for policy in ("p", "q"):
        trainer.close(policy)
    for i, model in enumerate(together):
        np.testing.assert_allclose(found[model].values.values, wanted[i].values.values, rtol=0, atol=1e-5)
        assert found[model].metrics == pytest.approx(wanted[i].metrics, rel=1e-5, abs=1e-5)
        assert relative_error(trainer.gradients(model), trainer.gradients(alone[i])) < 1e-5


def test_a_forward_gives_values_alone_and_changes_nothing(
    trainer: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model, datums = create(), valued(9, LENGTHS)
    before = state(trainer, model, tmp_path / "before")
    bare = [{"tokens": datum["tokens"]} for datum in datums]
    output = apply(trainer, model, replace(op(bare), forward_only=True))
    assert output.metrics["loss:sum"] == 0.0
    assert state(trainer, model, tmp_path / "after") == before
    np.testing.assert_array_equal(output.values.values, run(trainer, model, datums).values.values)


def test_a_value_that_overflows_fails_by_datum_and_leaves_the_state_bit_identical(
    trainer: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model = create()
    run(trainer, model, valued(3, LENGTHS))
    before = state(trainer, model, tmp_path / "before")
    datums = valued(9, LENGTHS)
    datums[2]["returns"][-1] = 1e30
    error = apply(trainer, model, op(datums))
    assert isinstance(error, UserOpError)
    assert str(error).startswith("datum 2: its ppo_critic loss is inf. Non-finite values"), "programs look for the word"
    assert state(trainer, model, tmp_path / "after") == before


@pytest.mark.parametrize("case", ["qwen2, window", "gemma2", "qwen3.5, vision", "helium (unlisted)"])
def test_a_critic_is_the_same_where_logits_are_capped_or_datums_padded(case: str, tmp_path: Path) -> None:
    """Values are computed from the last hidden states, before anything the architecture does to logits."""
    base = architectures.build(case, tmp_path / "base")
    backend = open_trainer(base)
    apply(backend, "m", Create(SPEC, critic=True))
    run(backend, "m", valued(0, LENGTHS))
    apply(backend, "m", STEP)
    twin = reference_of(backend, "m", base, tmp_path / "peft")
    datums = valued(9, LENGTHS)
    output = run(backend, "m", datums)
    for found, wanted in zip(output.values, twin.forward(datums), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    twin.backward(datums, "ppo_critic")
    assert relative_error(backend.gradients("m"), twin.gradients()) < 1e-5


class Widths(TorchDispatchMode):
    """Counts the results of torch operations whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # With more rows than the head's weight has when it is transposed.
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (VOCAB_SIZE,) and out.numel() > 64 * VOCAB_SIZE:
            self.logits += 1
        return out


@pytest.mark.parametrize("case", ["qwen3", "helium (unlisted)"])
def test_a_critic_makes_no_logits(case: str, tmp_path: Path) -> None:
    backend = open_trainer(architectures.build(case, tmp_path / "base"), micro_batch_tokens=128)
    backend.apply({"c": Create(SPEC, critic=True), "p": Create(SPEC)})
    supervise = ForwardBackward(batch(supervised(1, (60, 60))), "cross_entropy")
    counts = {}
    for model, one in (("c", op(valued(1, (60, 60)))), ("p", supervise)):
        with Widths() as widths:
            backend.apply({model: one})
        counts[model] = widths.logits
    assert counts["c"] == 0
    assert counts["p"] > 0


def test_a_bfloat16_base_is_as_near_to_fp32_as_transformers_itself(base: Path, tmp_path: Path) -> None:
    rounded = open_trainer(base, "bfloat16")
    apply(rounded, "m", Create(SPEC, critic=True))
    run(rounded, "m", valued(0, LENGTHS))
    apply(rounded, "m", STEP)
    exact = reference_of(rounded, "m", base, tmp_path / "peft")
    theirs = CriticReference(base, tmp_path / "peft", torch.bfloat16)
    datums = valued(9, MANY_LENGTHS)
    output = run(rounded, "m", datums)
    assert output.values.values.dtype == np.float32
    found = Found(list(output.values), output.metrics["loss:sum"], rounded.gradients("m"))
    check_rounding(found, exact, theirs, datums, "ppo_critic")


def numbers(n: int, low: float, high: float) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, n, elements=st.floats(low, high, width=32), fill=None)


@st.composite
def drawn(draw: st.DrawFn) -> Datum:
    n = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    inputs = {"values": draw(numbers(n, -2, 2)), "returns": draw(numbers(n, -4, 4)), "weights": draw(numbers(n, -2, 2))}
    return {"tokens": rng.integers(0, VOCAB_SIZE, n, dtype=np.int32), **inputs}


@pytest.fixture(scope="module")
def twins(
    trainer: Trainer, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Trainer, CriticReference]]:
    apply(trainer, "random", Create(SPEC, critic=True))
    run(trainer, "random", valued(0, LENGTHS))
    apply(trainer, "random", STEP)
    yield trainer, reference_of(trainer, "random", base, tmp_path_factory.mktemp("random") / "peft", torch.float64)
    trainer.close("random")


# Never derandomized: each run searches different cases, and a failure prints a line that repeats it.
@settings(
    max_examples=25,
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(datums=st.lists(drawn(), min_size=1, max_size=5), clip=st.floats(0, 3, width=32))
def test_any_batch_equals_the_reference(
    twins: tuple[Trainer, CriticReference], datums: list[Datum], clip: float
) -> None:
    """Loss and gradient are within 1e-5 of the tokens' own sizes, because weights of either sign may cancel.

    The comparison is at the critic's own values, which are checked first: if a value almost equals its return, their
    squared difference has no digit that fp32 values determine.
    """
    trainer, reference = twins
    config = {"value_clip": clip}
    output = run(trainer, "random", datums, **config)
    found = trainer.gradients("random")
    apply(trainer, "random", DropGradients())
    values = list(output.values)
    for mine, theirs in zip(values, reference.forward(datums), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    loss = reference.backward(datums, "ppo_critic", config, values)
    wanted = reference.take_gradients()
    assert abs(output.metrics["loss:sum"] - loss) <= 1e-5 * reference.size(datums, "ppo_critic", config) + FLOOR
    size = 0.0
    for i, one in enumerate(datums):
        for token in range(len(one["tokens"])):
            alone = np.where(np.arange(len(one["tokens"])) == token, one["weights"], 0).astype(np.float32)
            reference.backward([{**one, "weights": alone}], "ppo_critic", config, values[i : i + 1])
            size += length(reference.take_gradients())
    assert length({name: found[name] - wanted[name] for name in wanted}) <= 1e-5 * size + FLOOR

"""Promises of every TrainingBackend, on plain torch and DeepSpeed at each ZeRO stage.

The promises are in workers/backends/training/base.py. test_training_ranks.py covers two ranks, tests/parity/ the
numbers themselves.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from app.domain.ops import DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import CriticOutput, Done, ForwardBackwardOutput
from app.errors import ServerOpError, UserOpError, WeightsOverflow
from tests.conformance.trainers import (
    GOOD,
    OTHER,
    SPEC,
    STEP,
    VALUED,
    apply,
    backend,
    base,
    create,
    dtype_of,
    of_adapters,
    state,
    weights_file,
)
from tests.custom_losses import parsed
from tests.models import VOCAB_SIZE
from tests.parity.datums import batch, policy, supervised, valued
from tests.parity.reference import relative_error
from workers.backends.training.base import ADAPTER_FILE, Create
from workers.backends.training.passes import Pass
from workers.backends.training.trainer import Trainer

__all__ = ["backend", "base", "create", "weights_file"]  # the fixtures


def spoiled(op: ForwardBackward, datum: int) -> ForwardBackward:
    """OTHER with a datum whose ratio overflows."""
    datums = policy(2, (12, 25, 3))
    datums[datum]["logprobs"][-1] = -1e4
    return replace(op, batch=batch(datums))


def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
    return -(logprobs * weights).sum(), {}


def vanishing(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
    return (logprobs * weights).sum() / (logprobs.shape[0] - 30), {}


def custom(fn: Any, op: ForwardBackward = GOOD) -> ForwardBackward:
    """The batch under another loss, of logprobs and weights."""
    rank = len(op.batch.inputs["weights"].shapes[0])
    return replace(op, loss_fn="custom", custom=parsed(fn, {"logprobs": rank, "weights": rank}))


def test_open_reports_what_the_model_can_take(backend: Trainer) -> None:
    info = backend._engine.base.info
    assert (info.name, info.arch, info.vocab_size, info.max_context) == ("tiny", "Qwen3ForCausalLM", VOCAB_SIZE, 512)
    assert info.trainable_groups == ("attn", "mlp", "unembed")


def test_describe_reads_the_live_engine(backend: Trainer, request: pytest.FixtureRequest) -> None:
    found = backend.describe()
    name = request.node.callspec.params["backend"]
    stage = None if name.endswith("torch") else int(name[-1])
    assert found["zero_stage"] == stage
    assert found["trainer"] == ("Qwen3ForCausalLM" if stage is None else "DeepSpeedEngine")
    assert (found["ranks"], found["dtype"]) == (1, dtype_of(name))


def test_results_are_in_request_order_and_in_the_shape_of_the_targets(
    backend: Trainer, create: Callable[..., str]
) -> None:
    model = create()
    datums = [*supervised(3, (5, 40), width=2), *supervised(4, (17,), width=3)]
    together = apply(backend, model, ForwardBackward(batch(datums), "cross_entropy", forward_only=True))
    assert [array.shape for array in together.logprobs] == [(5, 2), (40, 2), (17, 3)]
    for found, datum in zip(together.logprobs, datums, strict=True):
        alone = apply(backend, model, ForwardBackward(batch([datum]), "cross_entropy", forward_only=True))
        np.testing.assert_allclose(found, next(iter(alone.logprobs)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", [GOOD, OTHER], ids=["supervised", "policy"])
def test_metrics_name_their_reduction_and_hold_the_loss(
    backend: Trainer, create: Callable[..., str], op: ForwardBackward
) -> None:
    metrics = apply(backend, create(), op).metrics
    assert all(name.count(":") == 1 for name in metrics)
    assert metrics["tokens:sum"] == sum(n for (n,) in op.batch.tokens.shapes)
    assert np.isfinite(metrics["loss:sum"])


@pytest.mark.parametrize("width", [0, 3])
def test_a_cross_entropy_is_also_given_for_each_target(
    backend: Trainer, create: Callable[..., str], width: int
) -> None:
    given = batch(supervised(5, (9, 30, 4), width))
    bare = replace(given, inputs={"target_tokens": given.inputs["target_tokens"]})
    model = create()
    for one, weights in ((given, given.inputs["weights"].values), (bare, 1)):
        output = apply(backend, model, ForwardBackward(one, "cross_entropy", forward_only=True))
        assert output.elementwise_loss.shapes == output.logprobs.shapes
        np.testing.assert_array_equal(output.elementwise_loss.values, -weights * output.logprobs.values)
        assert output.metrics["loss:sum"] == pytest.approx(output.elementwise_loss.values.sum(), rel=1e-5)
    assert apply(backend, model, OTHER).elementwise_loss is None


def test_the_loss_is_a_sum_over_datums(backend: Trainer, create: Callable[..., str]) -> None:
    model, datums = create(), policy(2, (12, 25, 3))
    whole = apply(backend, model, ForwardBackward(batch(datums), "dro", forward_only=True)).metrics
    parts = [apply(backend, model, ForwardBackward(batch([d]), "dro", forward_only=True)).metrics for d in datums]
    for name in ("loss:sum", "kl:sum", "tokens:sum"):
        assert whole[name] == pytest.approx(sum(part[name] for part in parts), rel=1e-5)
    assert whole["ratio:max"] == pytest.approx(max(part["ratio:max"] for part in parts), rel=1e-5)


def test_gradients_add_up_until_the_step(backend: Trainer, create: Callable[..., str]) -> None:
    one, two = create(), create()
    datums = supervised(5, (9, 14, 6))
    apply(backend, one, ForwardBackward(batch(datums), "cross_entropy"))
    for datum in datums:
        apply(backend, two, ForwardBackward(batch([datum]), "cross_entropy"))
    assert relative_error(backend.gradients(two), backend.gradients(one)) < 1e-5
    apply(backend, two, STEP)
    assert backend.gradients(two) == {}


def test_one_pass_over_several_adapters_equals_each_alone(backend: Trainer, create: Callable[..., str]) -> None:
    specs = (SPEC, LoraSpec(rank=8, seed=2, train_mlp=False), LoraSpec(rank=2, seed=3))
    wide = batch(supervised(3, (14, 6), width=3))
    ops = (GOOD, OTHER, ForwardBackward(wide, "cross_entropy", {"entropy": 1.0}))
    alone, shared = [create(spec) for spec in specs], [create(spec) for spec in specs]
    wanted = [apply(backend, model, op) for model, op in zip(alone, ops, strict=True)]
    found = backend.apply(dict(zip(shared, ops, strict=True)))
    for i in range(len(ops)):
        assert relative_error(backend.gradients(shared[i]), backend.gradients(alone[i])) < 1e-5
        np.testing.assert_allclose(found[shared[i]].logprobs.values, wanted[i].logprobs.values, rtol=0, atol=1e-5)
        assert found[shared[i]].metrics == pytest.approx(wanted[i].metrics, rel=1e-5)


def test_an_op_alone_has_the_same_bits_whatever_else_was_run(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    first, second = create(), create()
    apply(backend, first, GOOD)
    backend.apply({create(): OTHER, create(LoraSpec(rank=2)): GOOD})
    apply(backend, second, GOOD)
    assert state(backend, first, tmp_path / "1") == state(backend, second, tmp_path / "2")


def test_forward_only_changes_nothing(backend: Trainer, create: Callable[..., str], tmp_path: Path) -> None:
    model = create()
    apply(backend, model, GOOD)
    before = state(backend, model, tmp_path / "before")
    only = apply(backend, model, replace(GOOD, forward_only=True))
    assert isinstance(only, ForwardBackwardOutput)
    assert state(backend, model, tmp_path / "after") == before


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_failed_op_names_its_datum_and_leaves_the_state_bit_identical(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, forward_only: bool
) -> None:
    model, spared = create(), create()
    for one in (model, spared):
        apply(backend, one, GOOD)
    before = state(backend, model, tmp_path / "before")
    bad = replace(spoiled(OTHER, datum=1), loss_fn="importance_sampling", forward_only=forward_only)
    error = apply(backend, model, bad)
    assert isinstance(error, UserOpError)
    assert "datum 1" in str(error)
    assert state(backend, model, tmp_path / "after") == before
    for one in (model, spared):
        apply(backend, one, OTHER)
    assert state(backend, model, tmp_path / "model") == state(backend, spared, tmp_path / "spared")


def test_a_finite_loss_with_an_endless_gradient_fails_too(backend: Trainer, create: Callable[..., str]) -> None:
    # ppo clips the loss of an overflowed ratio, but its derivative is 0 x inf.
    datums = policy(2, (12,))
    datums[0]["logprobs"][-1], datums[0]["advantages"][-1] = -1e4, 1.0
    error = apply(backend, create(), ForwardBackward(batch(datums), "ppo"))
    assert isinstance(error, UserOpError)
    assert "datum 0" in str(error)


def heavy() -> ForwardBackward:
    """A batch whose losses are finite, and the norm of whose gradient is not."""
    datums = supervised(1, (9, 30, 4))
    datums[0]["weights"][:] = 1e25
    return replace(GOOD, batch=batch(datums))


FAILING = {
    "gradient": (heavy(), "every loss is finite, but the gradient is not"),
    "importance_sampling": (replace(spoiled(OTHER, datum=0), loss_fn="importance_sampling"), "datum 0"),
    "custom": (custom(vanishing), "datum 1: the custom loss vanishing fails: node truediv"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_neighbour_of_a_failed_op_is_as_if_alone(backend: Trainer, create: Callable[..., str], case: str) -> None:
    failing, why = FAILING[case]
    bad, neighbour, alone = create(), create(), create()
    results = backend.apply({bad: failing, neighbour: GOOD})
    wanted = apply(backend, alone, GOOD)
    assert isinstance(results[bad], UserOpError)
    assert why in str(results[bad])
    assert results[neighbour].metrics == pytest.approx(wanted.metrics, rel=1e-5)
    assert relative_error(backend.gradients(neighbour), backend.gradients(alone)) < 1e-5
    assert backend.gradients(bad) == {}


@pytest.mark.parametrize("width", [0, 3])
def test_a_custom_loss_of_a_known_formula_gives_that_losses_bits(
    backend: Trainer, create: Callable[..., str], width: int
) -> None:
    known = ForwardBackward(batch(supervised(5, (9, 30, 4), width)), "cross_entropy")
    models = create(), create()
    outputs = [apply(backend, one, op) for one, op in zip(models, (known, custom(weighted, known)), strict=True)]
    assert outputs[0].logprobs.values.tobytes() == outputs[1].logprobs.values.tobytes()
    assert outputs[1].metrics["loss:sum"] == pytest.approx(outputs[0].metrics["loss:sum"], rel=1e-5)
    gradients = [backend.gradients(one) for one in models]
    assert all(gradients[1][name].tobytes() == found.tobytes() for name, found in gradients[0].items())


@pytest.mark.parametrize("backend", ["torch", "full torch"], indirect=True)
def test_a_trainer_makes_models_of_its_own_kind_alone(backend: Trainer) -> None:
    error = apply(backend, "other", Create(SPEC if backend._full else None))
    assert isinstance(error, UserOpError)


def test_a_step_without_gradients_is_a_step_on_zeros(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    dropped, empty, never = create(), create(), create()
    apply(backend, dropped, GOOD)
    assert apply(backend, dropped, DropGradients()) == Done()
    apply(backend, empty, replace(GOOD, batch=batch([])))
    before = state(backend, never, tmp_path / "before")
    for model in (dropped, empty, never):
        metrics = apply(backend, model, STEP).metrics
        assert (metrics["grad_norm"], metrics["learning_rate"]) == (0.0, 1e-2)
    ends = [state(backend, model, tmp_path / f"end-{model}") for model in (dropped, empty, never)]
    assert ends[0] == ends[1] == ends[2] != before


def test_steps_together_have_the_bits_of_steps_alone(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    """Of models that differ in settings, clipping, rank and number of steps; a step that fails harms no other."""
    settings = [
        replace(STEP.params, grad_clip_norm=1e-3),
        replace(STEP.params, grad_clip_norm=1e-2),
        replace(STEP.params, beta2=0.9, weight_decay=0.1),
        STEP.params,
    ]
    alone, beside = ([create(replace(SPEC, rank=2 + number)) for number in range(4)] for _ in range(2))
    for models in (alone, beside):
        apply(backend, models[0], STEP)
        for model in models:
            apply(backend, model, GOOD)
        last = backend._states[models[3]]
        last.restore_pending({name: torch.full_like(one, 1e30) for name, one in last.pending_gradients().items()})
    before = state(backend, beside[3], tmp_path / "before")
    steps = [OptimStep(params) for params in settings]
    wanted = [apply(backend, model, step) for model, step in zip(alone, steps, strict=True)]
    found = backend.apply(dict(zip(beside, steps, strict=True)))
    assert [found[model] for model in beside[:3]] == wanted[:3]
    assert isinstance(found[beside[3]], UserOpError) and "not finite" in str(found[beside[3]])
    for one, other in zip(alone, beside, strict=True):
        assert state(backend, one, tmp_path / f"{one} alone") == state(backend, other, tmp_path / f"{other} beside")
    assert state(backend, beside[3], tmp_path / "after") == before


def test_a_step_that_overflows_spoils_no_other_model(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    """Its weights are in the engine of a full fine-tuning trainer."""
    alone, beside, far = create(), create(), create()
    for model in (alone, beside, far):
        apply(backend, model, GOOD)
    wanted = apply(backend, alone, STEP)
    found = backend.apply({far: OptimStep(replace(STEP.params, learning_rate=1e20)), beside: STEP})
    assert isinstance(found[far], WeightsOverflow) and found[beside] == wanted
    backend.close(far)
    apply(backend, beside, GOOD)
    apply(backend, alone, GOOD)
    ends = [state(backend, model, tmp_path / model) for model in (alone, beside)]
    assert ends[0] == ends[1]


def test_the_norm_a_step_reports_is_from_before_clipping(backend: Trainer, create: Callable[..., str]) -> None:
    free, clipped = create(), create()
    for model in (free, clipped):
        apply(backend, model, GOOD)
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in backend.gradients(free).values())))
    for model, limit in ((free, 0.0), (clipped, norm / 100)):
        metrics = apply(backend, model, OptimStep(replace(STEP.params, grad_clip_norm=limit))).metrics
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_norm_of_the_parameters_is_from_after_the_step(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, weights_file: str
) -> None:
    model = create()
    apply(backend, model, GOOD)
    found = apply(backend, model, STEP).metrics["param_norm"]
    backend.capture(model, optimizer=False)(tmp_path)
    saved = load_file(tmp_path / weights_file).values()
    assert found == pytest.approx(sum(float((p.double() ** 2).sum()) for p in saved) ** 0.5, rel=1e-6)


def test_a_model_that_is_not_here_is_our_fault(backend: Trainer) -> None:
    backend.close("nobody")
    for op in (GOOD, STEP, DropGradients()):
        assert isinstance(apply(backend, "nobody", op), ServerOpError)


@of_adapters
def test_an_adapter_on_nothing_is_refused(backend: Trainer) -> None:
    spec = LoraSpec(rank=4, train_attn=False, train_mlp=False, train_unembed=False)
    assert isinstance(apply(backend, "nothing", Create(spec)), UserOpError)


@of_adapters
def test_a_critic_has_a_head_of_its_own_and_no_pair_on_the_bases(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model = create(critic=True)
    output = apply(backend, model, VALUED)
    assert isinstance(output, CriticOutput)
    assert [values.shape for values in output.values] == list(VALUED.batch.tokens.shapes)
    backend.capture(model, optimizer=False)(tmp_path)
    stored = load_file(tmp_path / ADAPTER_FILE)
    assert stored["base_model.model.score.weight"].shape == (1, 64)
    assert not any("lm_head" in name for name in stored)


@of_adapters
def test_a_critic_is_drawn_from_its_seed_alone(backend: Trainer, create: Callable[..., str], tmp_path: Path) -> None:
    heads = []
    for seed in (5, 5, 6):
        apply(backend, "fresh", Create(replace(SPEC, seed=seed), critic=True))
        folder = tmp_path / str(len(heads))
        folder.mkdir()
        backend.capture("fresh", optimizer=False)(folder)
        heads.append(load_file(folder / ADAPTER_FILE)["base_model.model.score.weight"])
    backend.close("fresh")
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.5 / 65 < heads[0].std().item() < 2 / 65


@of_adapters
def test_critics_and_policies_in_one_call_are_each_as_if_alone(backend: Trainer, create: Callable[..., str]) -> None:
    kinds: list[tuple[LoraSpec, dict[str, Any], ForwardBackward]] = [
        (SPEC, {"critic": True}, VALUED),
        (SPEC, {}, GOOD),
        (LoraSpec(rank=8, seed=2, train_mlp=False), {"critic": True}, replace(VALUED, batch=batch(valued(7, (12, 5))))),
    ]
    alone, shared = ([create(spec, **kind) for spec, kind, _ in kinds] for _ in range(2))
    wanted = [apply(backend, model, op) for model, (_, _, op) in zip(alone, kinds, strict=True)]
    found = backend.apply({model: op for model, (_, _, op) in zip(shared, kinds, strict=True)})
    for i, model in enumerate(shared):
        assert relative_error(backend.gradients(model), backend.gradients(alone[i])) < 1e-5
        assert found[model].metrics == pytest.approx(wanted[i].metrics, rel=1e-5, abs=1e-5)


def test_the_tensors_of_a_pass_that_ran_out_of_memory_are_free_at_once(
    backend: Trainer, create: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass may need their memory, and Python collects cycles much later. Beside idle models the same pass runs
    twice."""
    model, _idle, held = create(), create(), []

    def run(*_: object) -> None:
        assert [tensor() for tensor in held] == [None] * len(held)
        activations = torch.zeros(1)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("full")

    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Pass, "_run", run)
            assert isinstance(apply(backend, model, GOOD), UserOpError)
        assert len(held) == 2 and [tensor() for tensor in held] == [None, None]
    finally:
        gc.enable()

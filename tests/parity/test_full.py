"""Full fine-tuning against transformers and torch.optim.AdamW over the same weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from app.domain.ops import AdamParams, ForwardBackward, OptimStep
from app.domain.results import CriticOutput, Done
from app.errors import UserOpError
from app.settings import BaseModelSettings
from tests.parity import architectures
from tests.parity.datums import batch, data, supervised, valued
from tests.parity.reference import DecaysSummedInFp64, FullCriticReference, FullReference, relative_error
from tests.parity.rounding import MANY_LENGTHS, Found, check_rounding
from tests.parity.training import LENGTHS, apply, run
from workers.backends.training import backends
from workers.backends.training.base import Create, Load
from workers.backends.training.trainer import Trainer

# Heads tied, untied and padded, logits capped and scaled, stacked experts, a recurrent state, and one model whose
# gradients all come from autograd.
CASES = ("llama", "llama, tied head", "gemma2", "granite", "qwen3-moe", "qwen3.5", "inkling", "helium (unlisted)")
# The gated delta rule takes differences of log decays that were summed in fp32 over up to 64 tokens. At 10 a token the
# sums reach 400, so a difference is rounded by 3e-5, and transformers' own gradients differ from fp64 by 2e-5 to 6e-5.
# With that sum in fp64 they differ by 2e-6.
DECAYS = ("A_log", "dt_bias")
STEPS = {
    "weight decay": AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.3),
    "clipping": AdamParams(learning_rate=1e-2, eps=1e-12, grad_clip_norm=1e-2),
}
# Bound and eps as in test_training.py.
BOUND = 1e-3


def open_full(base: Path, dtype: str = "float32", **trainer: Any) -> Trainer:
    torch.set_num_threads(1)
    trainer = {"backend": "torch", "micro_batch_tokens": 64, **trainer}
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype=dtype, trainer=trainer), full=True)
    backend.open()
    return backend


def open_policy(base: Path, dtype: str = "float32", **trainer: Any) -> Trainer:
    backend = open_full(base, dtype, **trainer)
    assert apply(backend, "m", Create(None)) == Done()
    return backend


def reference_of(backend: Trainer, folder: Path) -> FullReference:
    folder.mkdir()
    backend.capture("m", optimizer=True)(folder)
    return FullReference(folder)


@pytest.mark.parametrize("case", CASES)
def test_logprobs_and_gradients_equal_the_reference(case: str, tmp_path: Path) -> None:
    backend = open_policy(architectures.build(case, tmp_path / "base"))
    run(backend, "m", ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy"))
    apply(backend, "m", OptimStep(AdamParams(learning_rate=1e-3, eps=1e-8)))
    reference = reference_of(backend, tmp_path / "model")
    datums = data("ppo", 9, LENGTHS)
    output = run(backend, "m", ForwardBackward(batch(datums), "ppo"))
    for found, wanted in zip(output.logprobs, reference.forward(datums), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    reference.backward(datums, "ppo")
    found, wanted = backend.gradients("m"), reference.gradients()
    assert relative_error(found, wanted) < (5e-5 if case == "qwen3.5" else 1e-5)
    for name in [name for name in found if name.endswith(DECAYS)]:
        del found[name], wanted[name]
    assert relative_error(found, wanted) < 1e-5


def test_gradients_of_decays_equal_the_reference_too_where_its_sum_is_not_rounded(tmp_path: Path) -> None:
    backend = open_policy(architectures.build("qwen3.5", tmp_path / "base"))
    reference = reference_of(backend, tmp_path / "model")
    datums = data("ppo", 9, LENGTHS)
    with DecaysSummedInFp64():
        run(backend, "m", ForwardBackward(batch(datums), "ppo"))
        reference.backward(datums, "ppo")
    assert relative_error(backend.gradients("m"), reference.gradients()) < 1e-5


@pytest.mark.parametrize("case", ["llama", "llama, tied head"])
@pytest.mark.parametrize("steps", STEPS)
def test_five_steps_stay_with_the_reference(case: str, steps: str, tmp_path: Path) -> None:
    """After five steps weights differ by less than BOUND of their movement; grad and parameter norms are equal."""
    backend, params = open_policy(architectures.build(case, tmp_path / "base")), STEPS[steps]
    twin = FullReference(tmp_path / "base")
    start = twin.weights()
    for seed in range(5):
        datums = supervised(seed, (9, 2, 14))
        run(backend, "m", ForwardBackward(batch(datums), "cross_entropy"))
        found = apply(backend, "m", OptimStep(params)).metrics
        twin.backward(datums, "cross_entropy")
        assert found["grad_norm"] == pytest.approx(twin.step(asdict(params)), rel=BOUND)
        assert found["param_norm"] == pytest.approx(twin.norm(), rel=1e-5)
        assert found["learning_rate"] == params.learning_rate
    ours = reference_of(backend, tmp_path / "end").weights()
    moved, wanted = ({name: end[name] - start[name] for name in start} for end in (ours, twin.weights()))
    assert relative_error(moved, wanted) < BOUND


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, True), (2, True)])
def test_a_stage_that_splits_nothing_on_one_rank_gives_the_bits_of_plain_torch(
    stage: int, offload: bool, tmp_path: Path
) -> None:
    base = architectures.build("llama, tied head", tmp_path / "base")
    op = ForwardBackward(batch(supervised(9, LENGTHS)), "cross_entropy")
    found = []
    for trainer in ({}, {"backend": "deepspeed", "zero_stage": stage, "offload": offload}):
        backend = open_policy(base, **trainer)
        stepped = [apply(backend, "m", one) for one in (op, OptimStep(STEPS["clipping"]), op)]
        found.append((*stepped[1:], {name: g.tobytes() for name, g in backend.gradients("m").items()}))
    assert found[0][0] == found[1][0]
    assert found[0][1].metrics == found[1][1].metrics
    assert found[0][2] == found[1][2]


def test_masters_keep_what_a_bfloat16_copy_cannot(tmp_path: Path) -> None:
    """Masters start with the values in the base model's files.

    Their steps are too small for the bfloat16 copy that is used in the computation.
    """
    base = architectures.build("llama", tmp_path / "base")
    backend = open_policy(base, "bfloat16")
    start = reference_of(backend, tmp_path / "start").weights()
    files = load_file(base / "model.safetensors")
    assert all(np.array_equal(start[name], tensor.numpy()) for name, tensor in files.items())
    params = AdamParams(learning_rate=1e-6, eps=1e-8)
    for _ in range(4):
        run(backend, "m", ForwardBackward(batch(supervised(0, LENGTHS)), "cross_entropy"))
        apply(backend, "m", OptimStep(params))
    end = reference_of(backend, tmp_path / "end").weights()
    # In four steps in one direction, Adam moves four times the learning rate.
    assert max(np.abs(end[name] - start[name]).max() for name in start) == pytest.approx(4e-6, rel=0.05)
    exported = tmp_path / "exported"
    exported.mkdir()
    with torch.profiler.profile(profile_memory=True) as profile:
        write = backend.capture("m", optimizer=False)
    copied = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert copied == pytest.approx(sum(weight.nbytes for weight in end.values()) / 2, rel=0.01)  # and two buffers
    write(exported)
    for name, tensor in load_file(exported / "model.safetensors").items():
        assert torch.equal(tensor, torch.from_numpy(end[name]).bfloat16())


def test_bfloat16_is_as_near_to_fp32_as_transformers_itself(tmp_path: Path) -> None:
    base = architectures.build("llama, tied head", tmp_path / "base")
    backend = open_policy(base, "bfloat16")
    datums = supervised(9, MANY_LENGTHS)
    output = run(backend, "m", ForwardBackward(batch(datums), "cross_entropy"))
    found = Found(list(output.logprobs), output.metrics["loss:sum"], backend.gradients("m"))
    check_rounding(found, FullReference(base), FullReference(base, torch.bfloat16), datums, "cross_entropy")


@pytest.mark.parametrize("case", ["qwen3", "qwen3.5"])
def test_layers_computed_again_give_the_same_gradients(case: str, tmp_path: Path) -> None:
    base = architectures.build(case, tmp_path / "base")
    op = ForwardBackward(batch(supervised(9, LENGTHS)), "cross_entropy")
    found = []
    for again in (False, True):
        backend = open_policy(base, activation_checkpointing=again)
        run(backend, "m", op)
        found.append(backend.gradients("m"))
    assert relative_error(found[1], found[0]) < 1e-6


def test_a_pass_that_failed_half_way_adds_nothing_to_the_next_ones_gradient(tmp_path: Path) -> None:
    """The base's parameters stay when the model whose pass failed is gone."""
    base = architectures.build("qwen3", tmp_path / "base")
    op = ForwardBackward(batch(supervised(9, LENGTHS)), "cross_entropy")
    backend, undisturbed = open_policy(base), open_policy(base)

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    failing = backend._engine.hidden_states.layers[0].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        backend.apply({"m": op})
    failing.remove()
    backend.close("m")
    assert backend.healthy() and apply(backend, "next", Create(None)) == Done()
    run(backend, "next", op)
    run(undisturbed, "m", op)
    found, wanted = backend.gradients("next"), undisturbed.gradients("m")
    assert all(np.array_equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("case", ["llama", "llama, tied head", "qwen3-moe"])
def test_a_critic_equals_transformers_sequence_classifier(case: str, tmp_path: Path) -> None:
    """Loss, gradients, five steps; transformers loads the critic's folder as a sequence classifier."""
    backend = open_full(architectures.build(case, tmp_path / "base"))
    params = AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=1.0)
    assert apply(backend, "v", Create(None, critic=True)) == Done()
    (tmp_path / "start").mkdir()
    backend.capture("v", optimizer=True)(tmp_path / "start")
    twin = FullCriticReference(tmp_path / "start")
    start = twin.weights()
    for seed in range(5):
        datums = valued(seed, LENGTHS)
        output = apply(backend, "v", ForwardBackward(batch(datums), "ppo_critic"))
        assert isinstance(output, CriticOutput)
        if seed == 0:
            for found, wanted in zip(output.values, twin.forward(datums), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        twin.backward(datums, "ppo_critic")
        if seed == 0:
            assert relative_error(backend.gradients("v"), twin.gradients()) < 1e-5
        stepped = apply(backend, "v", OptimStep(params)).metrics
        assert stepped["grad_norm"] == pytest.approx(twin.step(asdict(params)), rel=BOUND)
    (tmp_path / "end").mkdir()
    backend.capture("v", optimizer=True)(tmp_path / "end")
    ours = FullCriticReference(tmp_path / "end").weights()
    moved, wanted_moves = ({name: end[name] - start[name] for name in start} for end in (ours, twin.weights()))
    assert relative_error(moved, wanted_moves) < BOUND


def test_critics_and_policies_take_turns_resume_and_do_not_take_each_others_weights(tmp_path: Path) -> None:
    backend = open_full(architectures.build("llama, tied head", tmp_path / "base"))
    ops = {"v": ForwardBackward(batch(valued(6, LENGTHS)), "ppo_critic")}
    ops["m"] = ForwardBackward(batch(supervised(6, LENGTHS)), "cross_entropy")
    step = OptimStep(AdamParams(learning_rate=1e-3))
    for model in ops:
        assert apply(backend, model, Create(None, critic=model == "v")) == Done()
    for _ in range(2):
        for model, op in ops.items():
            apply(backend, model, op)
            apply(backend, model, step)
    for model in ops:
        (tmp_path / model).mkdir()
        backend.capture(model, optimizer=True)(tmp_path / model)
    for model, other in (("v", "m"), ("m", "v")):
        assert isinstance(apply(backend, model, Load(tmp_path / other, optimizer=True)), UserOpError)
        twin = f"{model} again"
        assert apply(backend, twin, Create(None, tmp_path / model, optimizer=True, critic=model == "v")) == Done()
        ends = []
        for one in (model, twin):
            outputs = [apply(backend, one, op) for op in (ops[model], step, ops[model])]
            ends.append((outputs[1], outputs[2].metrics, backend.gradients(one)))
        assert ends[0][:2] == ends[1][:2]
        assert all(np.array_equal(ends[1][2][name], gradient) for name, gradient in ends[0][2].items())


def test_a_critic_that_could_not_be_saved_is_refused(tmp_path: Path) -> None:
    backend = open_full(architectures.build("granite", tmp_path / "base"))
    error = apply(backend, "v", Create(None, critic=True))
    assert isinstance(error, UserOpError)
    assert "GraniteForCausalLM" in str(error)

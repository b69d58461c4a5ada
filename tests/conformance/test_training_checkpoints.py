"""Checkpoints and exports of every training backend: they resume bit for bit, and a useless one changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM

from app.domain.ops import LoraSpec
from app.domain.results import Done, ForwardBackwardOutput
from app.errors import ServerOpError, UserOpError
from tests.conformance.trainers import (
    GOOD,
    OF_WEIGHTS,
    OTHER,
    SPEC,
    STEP,
    VALUED,
    apply,
    backend,
    base,
    create,
    of_adapters,
    state,
    weights_file,
)
from tests.full_disk import full_disk
from tests.parity import architectures
from workers.backends.training.base import GRADIENTS_FILE, OPTIMIZER_FILE, Create, Load
from workers.backends.training.trainer import Trainer

__all__ = ["backend", "base", "create", "weights_file"]  # the fixtures


def files(folder: Path, write: Callable[[Path], None]) -> dict[str, bytes]:
    folder.mkdir()
    write(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_save_and_load_resume_bit_for_bit(backend: Trainer, create: Callable[..., str], tmp_path: Path) -> None:
    model, other = create(), create(replace(SPEC, seed=7))
    saved = state(backend, model, tmp_path / "saved")
    assert apply(backend, other, Load(tmp_path / "saved", optimizer=True)) == Done()
    fresh = create(LoraSpec(rank=1), source=tmp_path / "saved", optimizer=True)
    assert state(backend, other, tmp_path / "other") == state(backend, fresh, tmp_path / "fresh") == saved
    for one in (model, other, fresh):
        apply(backend, one, OTHER)
        apply(backend, one, STEP)
    ends = [state(backend, one, tmp_path / f"end-{one}") for one in (model, other, fresh)]
    assert ends[0] == ends[1] == ends[2] != saved


@pytest.mark.parametrize("optimizer", [True, False])
def test_what_was_captured_is_written_bit_for_bit_whatever_was_run_since(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, optimizer: bool
) -> None:
    model = create()
    then = files(tmp_path / "then", lambda folder: backend.capture(model, optimizer=optimizer)(folder))
    write = backend.capture(model, optimizer=optimizer)
    for op in (GOOD, STEP, OTHER):
        apply(backend, model, op)
    assert files(tmp_path / "now", lambda folder: backend.capture(model, optimizer=optimizer)(folder)) != then
    backend.close(model)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            assert thread.submit(files, tmp_path / str(next(_numbers)), write).result() == then
    stored = sum(len(content) for name, content in then.items() if name.endswith(".safetensors"))
    assert write.size == pytest.approx(stored, rel=0.1)  # the files also have names and shapes
    assert (OPTIMIZER_FILE in then) == optimizer


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, train_unembed=False)], ids=["head trained", "head tied"])
def test_an_export_scores_as_the_model_did_and_needs_neither_peft_nor_the_base(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, spec: LoraSpec
) -> None:
    model = create(spec)
    looked = replace(GOOD, forward_only=True)
    then = apply(backend, model, looked).logprobs
    write = backend.export(model)
    for op in (GOOD, STEP):
        apply(backend, model, op)
    assert abs(apply(backend, model, looked).logprobs.values - then.values).max() > 1e-2
    with ThreadPoolExecutor(1) as thread:
        thread.submit(write, tmp_path / "exported").result()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert exported.config.tie_word_embeddings == (backend._full or not spec.train_unembed)
    for found, tokens, targets in zip(then, GOOD.batch.tokens, GOOD.batch.inputs["target_tokens"], strict=True):
        with torch.no_grad():
            logprobs = exported(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
        wanted = logprobs[torch.arange(len(tokens)), torch.from_numpy(targets.astype(np.int64))]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_an_export_is_written_the_same_whatever_was_run_since_and_by_a_full_disk_is_an_os_error(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model = create()
    then = files(tmp_path / "then", backend.export(model))
    write = backend.export(model)
    for op in (GOOD, STEP):
        apply(backend, model, op)
    assert files(tmp_path / "now", write) == then
    assert write.size == pytest.approx(len(then["model.safetensors"]), rel=0.1)
    with full_disk(10_000), pytest.raises(OSError, match="not written"):
        write(tmp_path / "full")


def test_to_capture_leaves_the_model_as_it_was(backend: Trainer, create: Callable[..., str], tmp_path: Path) -> None:
    captured, spared = create(), create()
    for model in (captured, spared):
        apply(backend, model, GOOD)
    backend.capture(captured, optimizer=True)
    backend.export(captured)
    for model in (captured, spared):
        apply(backend, model, STEP)
    assert state(backend, captured, tmp_path / "1") == state(backend, spared, tmp_path / "2")


def test_a_snapshot_between_two_gradients_goes_on_to_the_same_bits(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model, snapshot = create(), tmp_path / "snapshot"
    snapshot.mkdir()
    for op in (GOOD, STEP, OTHER):
        apply(backend, model, op)
    backend.capture(model, optimizer=True, gradients=True)(snapshot)
    lora = None if backend._full else SPEC
    apply(backend, "restored", Create(lora, snapshot, optimizer=True, gradients=True))
    apply(backend, "forgot", Create(lora, snapshot, optimizer=True))
    assert backend.gradients("restored") and not backend.gradients("forgot")
    for op in (GOOD, STEP, GOOD):
        for one in (model, "restored"):
            apply(backend, one, op)
        ends = [state(backend, one, tmp_path / f"{next(_numbers)}") for one in (model, "restored")]
        assert ends[0] == ends[1]
    for one in ("restored", "forgot"):
        backend.close(one)


def test_a_pending_gradient_that_is_damaged_or_of_another_model_is_refused(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model, snapshot = create(), tmp_path / "snapshot"
    snapshot.mkdir()
    apply(backend, model, GOOD)
    backend.capture(model, optimizer=True, gradients=True)(snapshot)
    made = Create(None if backend._full else SPEC, snapshot, optimizer=True, gradients=True)
    for content in (b"damaged", save({"another": torch.zeros(3)})):
        (snapshot / GRADIENTS_FILE).write_bytes(content)
        with pytest.raises(UserOpError, match="the pending gradient"):
            raise apply(backend, "restored", made)


def test_a_full_disk_is_an_os_error_and_the_model_goes_on(
    backend: Trainer, create: Callable[..., str], tmp_path: Path
) -> None:
    model = create()
    (tmp_path / "full").mkdir()
    with full_disk(10_000), pytest.raises(OSError, match="not written"):
        backend.capture(model, optimizer=True)(tmp_path / "full")
    assert backend.healthy()
    assert isinstance(apply(backend, model, GOOD), ForwardBackwardOutput)


def test_a_model_that_is_not_here_cannot_be_captured(backend: Trainer) -> None:
    with pytest.raises(ServerOpError, match="not loaded"):
        backend.capture("nobody", optimizer=True)
    with pytest.raises(ServerOpError, match="not loaded"):
        backend.export("nobody")
    assert backend.healthy()


def test_loading_without_the_optimizer_resets_it(backend: Trainer, create: Callable[..., str], tmp_path: Path) -> None:
    model = create()
    (tmp_path / "saved").mkdir()
    backend.capture(model, optimizer=False)(tmp_path / "saved")
    assert not (tmp_path / "saved" / OPTIMIZER_FILE).exists()
    apply(backend, model, GOOD)
    apply(backend, model, Load(tmp_path / "saved", optimizer=False))
    assert backend.gradients(model) == {}
    fresh = create(source=tmp_path / "saved")
    assert state(backend, model, tmp_path / "1") == state(backend, fresh, tmp_path / "2")


@pytest.mark.parametrize("case", ["no optimizer", "damaged", "missing"])
def test_a_checkpoint_that_cannot_be_used_changes_nothing(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, weights_file: str, case: str
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    backend.capture(create(), optimizer=case != "no optimizer")(folder)
    if case in ("damaged", "missing"):
        weights = folder / weights_file
        weights.write_bytes(weights.read_bytes()[:-100]) if case == "damaged" else weights.unlink()
    check_refused(backend, create(), folder)


@of_adapters
@pytest.mark.parametrize("spec", [LoraSpec(rank=5), LoraSpec(rank=4, train_mlp=False), LoraSpec(rank=4, alpha=8.0)])
def test_an_adapter_of_another_shape_changes_nothing(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, spec: LoraSpec
) -> None:
    backend.capture(create(spec), optimizer=True)(tmp_path)
    check_refused(backend, create(), tmp_path)


@pytest.mark.parametrize("backend", OF_WEIGHTS, indirect=True)
@pytest.mark.parametrize("case", ["llama", "qwen3", "a tensor less"])
def test_weights_of_another_model_change_nothing(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, case: str
) -> None:
    folder = tmp_path / "other"
    if case in architectures.CASES:
        architectures.build(case, folder)
    else:
        backend.capture(create(), optimizer=False)(folder)
        stored = load_file(folder / "model.safetensors")
        stored.pop("model.norm.weight")
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    check_refused(backend, create(), folder, optimizer=False)


_numbers = count()


def check_refused(backend: Trainer, model: str, folder: Path, *, optimizer: bool = True) -> None:
    """Checks that `model` refuses to load it, and is unchanged."""
    tmp_path = folder.with_name(f"states-{next(_numbers)}")
    apply(backend, model, GOOD)
    before = state(backend, model, tmp_path / "before")
    assert isinstance(apply(backend, model, Load(folder, optimizer=optimizer)), UserOpError)
    assert state(backend, model, tmp_path / "after") == before


@of_adapters
def test_a_critic_resumes_bit_for_bit(backend: Trainer, create: Callable[..., str], tmp_path: Path) -> None:
    model, other = create(critic=True), create(replace(SPEC, seed=7), critic=True)
    saved = state(backend, model, tmp_path / "saved")
    assert apply(backend, other, Load(tmp_path / "saved", optimizer=True)) == Done()
    fresh = create(LoraSpec(rank=1), source=tmp_path / "saved", optimizer=True, critic=True)
    for one in (model, other, fresh):
        apply(backend, one, VALUED)
        apply(backend, one, STEP)
    ends = [state(backend, one, tmp_path / f"end-{one}") for one in (model, other, fresh)]
    assert ends[0] == ends[1] == ends[2] != saved


@of_adapters
@pytest.mark.parametrize("critic", [True, False])
def test_weights_of_the_other_role_change_nothing(
    backend: Trainer, create: Callable[..., str], tmp_path: Path, critic: bool
) -> None:
    # Without the head's LoRA pair, a policy's adapter differs only in the value head.
    spec = replace(SPEC, train_unembed=False)
    backend.capture(create(spec, critic=critic), optimizer=True)(tmp_path)
    model = create(spec, critic=not critic)
    before = state(backend, model, tmp_path / "before")
    role, other = ("critic", "policy") if critic else ("policy", "critic")
    for op in (Load(tmp_path, optimizer=False), Create(spec, tmp_path, critic=not critic)):
        error = apply(backend, model, op)
        assert isinstance(error, UserOpError)
        assert f"the checkpoint is of a {role}, but this model is a {other}" in str(error)
    assert state(backend, model, tmp_path / "after") == before

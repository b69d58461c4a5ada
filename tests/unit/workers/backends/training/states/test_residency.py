"""The least recently used models leave the device, and come back on their next Op, bit for bit."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.errors import OpError, UserOpError
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised, valued
from tests.parity.training import state
from workers.backends.training import backends
from workers.backends.training.base import GRADIENTS_FILE, Create
from workers.backends.training.passes import Pass
from workers.backends.training.ranks import RankGroup, total_norms
from workers.backends.training.states.adapter import AdapterState
from workers.backends.training.states.base import NO_FILES
from workers.backends.training.states.residency import Residency
from workers.backends.training.trainer import Trainer
from workers.models.adapter import pieces

META = torch.device("meta")
MODELS = ("a", "b", "c")


class State:
    """Knows where it is. The meta device stands in for a GPU."""

    def __init__(self) -> None:
        self.device = self.before = META

    def move(self, device: torch.device) -> None:
        self.device = device

    def progress(self) -> bool:
        """True if it moved since the last call."""
        before, self.before = self.before, self.device
        return before != self.device


def progress(states: dict[str, State]) -> str:
    return "".join(name for name, one in states.items() if one.progress())


def test_the_longest_unused_leave_and_come_back_on_their_next_use() -> None:
    states = {name: State() for name in "abcd"}
    residency = Residency(META, 2)
    for use, wanted, count in (
        ("a", "", 1),
        ("b", "", 2),
        ("a", "", 2),
        ("c", "b", 2),  # b is the least recently used
        ("a", "", 2),
        ("b", "bc", 2),
        ("ad", "b", 2),
    ):
        residency.bring(states, use)
        assert (progress(states), len(residency)) == (wanted, count), use
        assert {states[name].device for name in use} == {META}


def test_without_a_limit_nothing_moves() -> None:
    states = {name: State() for name in "abcd"}
    residency = Residency(META, 0)
    for use in ("a", "bcd", "b", "a"):
        residency.bring(states, use)
    assert (progress(states), len(residency)) == ("", 4)


def test_models_that_are_not_wanted_leave_where_memory_ran_out() -> None:
    states = {name: State() for name in "abc"}
    residency = Residency(META, 0)
    residency.bring(states, "abc")
    assert residency.keep_only(states, "b") and progress(states) == "ac"
    assert not residency.keep_only(states, "b"), "there is nobody else"
    residency.bring(states, "ab")
    assert (progress(states), len(residency)) == ("a", 2)


def test_room_is_made_for_a_model_that_is_yet_to_come_and_a_closed_one_takes_none() -> None:
    states = {"a": State()}
    residency = Residency(META, 1)
    residency.bring(states, "a")
    residency.bring(states, "b")
    assert progress(states) == "a"
    states["b"] = State()
    del states["a"]
    residency.forget("a")
    residency.bring(states, "a")
    states["a"] = State()
    assert progress(states) == "b", "what has a known name is not taken for what went away"
    residency.forget("a")
    residency.bring(states, "b")
    assert (progress(states), len(residency)) == ("b", 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


def opened(base: Path, most: int, *, full: bool = False) -> Trainer:
    torch.set_num_threads(1)
    trainer = {"backend": "torch", "micro_batch_tokens": 64, "device_models": most}
    settings = BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer)
    backend = backends.create(settings, full=full)
    backend.open()
    return backend


def test_models_that_come_and_go_train_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    """The models have pending gradients and optimizer state while they move, a critic among them."""
    ends = []
    for most in (1, 0):
        backend = opened(base, most)
        for i, model in enumerate(MODELS):
            backend.apply({model: Create(LoraSpec(rank=2 + i, seed=i), critic=model == "c")})
        for turn in range(3):
            for model in MODELS:
                backend.apply({model: work(model, turn)})
            for model in MODELS:
                backend.apply({model: replace(work(model, turn + 5), forward_only=turn == 1)})
            for model in MODELS[turn:]:
                backend.apply({model: DropGradients() if turn == 1 else STEP})
        assert backend.describe()["models_on_device"] == (most or len(MODELS))
        ends.append([state(backend, model, tmp_path / f"{most}-{model}") for model in MODELS])
        for model in MODELS:
            backend.close(model)
        assert backend.describe()["models_on_device"] == 0
    assert ends[0] == ends[1]


STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_pass_has_no_more_models_than_stay_on_the_device(
    base: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sizes, models = opened(base, most), [], "abd"
    for i, model in enumerate(models):
        backend.apply({model: Create(LoraSpec(rank=2, seed=i))})
    run = Pass.run

    def counted(one: Pass, progress: Any) -> None:
        sizes.append(len(one._jobs))
        assert backend.describe()["models_on_device"] <= (most or len(models))
        run(one, progress)

    monkeypatch.setattr(Pass, "run", counted)
    found = backend.apply({model: work(model, 0) for model in models})
    assert list(found) == list(models) and not any(isinstance(one, OpError) for one in found.values())
    assert sizes == {0: [3], 1: [1, 1, 1], 2: [2, 1]}[most]


@pytest.mark.parametrize("call", ["pass", "create", "move"])
def test_memory_that_idle_models_hold_fails_no_call(
    base: Path, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocation fails while another model is on the device."""
    ends = []
    for room in (1, 3):
        backend = opened(base, 0)
        for model in "ab":
            backend.apply({model: Create(LoraSpec(rank=2, seed=3))})
        with monkeypatch.context() as patch:
            if call == "move":
                backend._residency.keep_only(backend._states, "b")
            for owner, method in ((Pass, "run"), (type(backend._models), "fresh"), (AdapterState, "move")):
                patch.setattr(owner, method, _short_of_memory(backend, getattr(owner, method), room))
            if call == "create":
                backend.close("a")
                backend.apply({"a": Create(LoraSpec(rank=2, seed=3))})
            found = backend.apply({"a": work("a", 1)})["a"]
        assert not isinstance(found, OpError), found
        backend.apply({"b": work("b", 1)})
        assert backend.describe()["models_on_device"] == 2
        ends.append([state(backend, model, tmp_path / f"{room}-{model}") for model in "ab"])
    assert ends[0] == ends[1]


def test_models_that_do_not_fit_together_run_one_by_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(base, 0)
    for model in "ab":
        backend.apply({model: Create(LoraSpec(rank=2))})
    backend._residency.keep_only(backend._states, ())
    monkeypatch.setattr(AdapterState, "move", _short_of_memory(backend, AdapterState.move, 1))
    for op in (work("a", 1), STEP):
        found = backend.apply(dict.fromkeys("ab", op))
        assert not any(isinstance(one, OpError) for one in found.values()), found
        assert backend.describe()["models_on_device"] == 1


def _short_of_memory(backend: Trainer, method: Any, room: int) -> Any:
    """`method`, which fails while more than `room` models are on the device."""

    def run(*arguments: Any) -> Any:
        if backend.describe()["models_on_device"] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(*arguments)

    return run


def test_a_pass_that_has_all_memory_and_too_little_fails_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(base, 0)
    for model in "ab":
        backend.apply({model: Create(LoraSpec(rank=2))})
    with monkeypatch.context() as patch:
        patch.setattr(Pass, "run", _short_of_memory(backend, Pass.run, 0))
        found = backend.apply({model: work(model, 1) for model in "ab"})
    for one in found.values():
        assert isinstance(one, UserOpError) and "Send shorter datums" in str(one)
    assert not any(isinstance(one, OpError) for one in backend.apply({m: work(m, 1) for m in "ab"}).values())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("before", [[0], [0, 1], [0, None, 1], [0, 1, None, 2], [0, None], [0, "step", 1, 2], []])
def test_the_norm_of_a_step_is_that_of_its_gradient_to_the_bit(
    base: Path, full: bool, before: list[int | str | None]
) -> None:
    """After passes over these batches; None drops the gradient. A step knows the norm only after one pass."""
    backend = opened(base, 0, full=full)
    backend.apply({"a": Create(None if full else LoraSpec(rank=2))})
    one: Any = backend._states["a"]
    for seed in before:
        op = STEP if seed == "step" else DropGradients() if seed is None else work("a", int(seed))
        assert not isinstance(backend.apply({"a": op})["a"], OpError)
    gradients = one.pending_gradients() if full or one.pending is None else pieces(one.pending)
    (wanted,) = total_norms([(one.shards, gradients or {name: torch.zeros(1) for name in one.shards.owners})])
    result: Any = backend.apply({"a": STEP})["a"]
    assert result.metrics["grad_norm"] == float(wanted)


def test_a_step_that_failed_and_runs_again_takes_the_norm_of_the_gradient_that_is_left(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try has scaled the gradient."""
    backend = opened(base, 0)
    backend.apply({"a": Create(LoraSpec(rank=2))})
    backend.apply({"a": work("a", 0)})
    clipped = OptimStep(replace(STEP.params, grad_clip_norm=1e-3))
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(torch, "_fused_adamw_", Mock(side_effect=MemoryError))
        backend.apply({"a": clipped})
    result: Any = backend.apply({"a": clipped})["a"]
    assert result.metrics["grad_norm"] == pytest.approx(1e-3, rel=1e-2)


def test_a_copy_that_waits_to_be_written_keeps_nothing_on_the_device(base: Path, tmp_path: Path) -> None:
    backend = opened(base, 0)
    backend.apply({"a": Create(LoraSpec(rank=2))})
    backend.apply({"a": work("a", 0)})
    states: Any = backend._states
    kept = [weakref.ref(tensor) for tensor in states["a"].tensors()]
    write = backend.capture("a", optimizer=True, gradients=True)
    backend.apply({"a": STEP})
    assert kept[-1]() is None, "the step has dropped the gradient"
    backend.close("a")
    assert not any(tensor() is not None for tensor in kept)
    write(tmp_path)
    assert (tmp_path / GRADIENTS_FILE).exists()


def test_only_rank_0_copies_an_adapter_that_is_saved(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(base, 0)
    backend.apply({"a": Create(LoraSpec(rank=2))})
    state: Any = backend._states["a"]
    state.shards = replace(state.shards, ranks=RankGroup(rank=1, size=2))
    monkeypatch.setattr("workers.backends.training.states.adapter.copied", Mock(side_effect=MemoryError))
    assert state.capture(optimizer=False, gradients=True) is NO_FILES


def work(model: str, seed: int) -> ForwardBackward:
    if model == "c":
        return ForwardBackward(batch(valued(seed, (9, 14))), "ppo_critic")
    return ForwardBackward(batch(supervised(seed, (9, 14))), "cross_entropy")


def test_all_of_a_model_leaves_the_device(base: Path) -> None:
    backend = opened(base, 1)
    backend.apply({"a": Create(LoraSpec(rank=2))})
    backend.apply({"a": work("a", 0)})
    state: Any = backend._states["a"]
    tensors = list(state.tensors())
    before = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    backend.apply({"b": Create(LoraSpec(rank=2))})
    after = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert all(old != new for old, new in zip(before, after, strict=True))
    # The weights, two moments for each of their pieces, and the pending gradient.
    assert len(tensors) == 1 + 2 * 16 + 1
    assert {one.untyped_storage().data_ptr() for one in state.adapter.tensors.values()} == {after[0]}

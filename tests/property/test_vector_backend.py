"""Backend promises that the engine's tests rely on, checked on the real backend and on the one the tests use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import Done
from app.errors import UserOpError
from tests.property import vector_backend as vector
from workers.backends.training.base import Create, Load, TrainingBackend

SPEC = LoraSpec(rank=4, seed=1)
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))


@dataclass
class Case:
    """A backend, batches for it, one that fails as the user's fault, and all state of a model in it."""

    backend: TrainingBackend
    good: Callable[[int], ForwardBackward]
    poison: ForwardBackward
    gradients: Callable[[str], Any]

    def apply(self, model: str, op: Any) -> Any:
        return self.backend.apply({model: op})[model]

    def picture(self, model: str, folder: Path) -> Any:
        folder.mkdir(parents=True)
        self.backend.capture(model, optimizer=True)(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}, self.gradients(model)


def vector_case(folder: Path) -> Case:
    backend = vector.VectorBackend()

    def pending(model: str) -> Any:
        state = backend.states[model]
        return state.gradient, state.pending

    return Case(backend, vector.backward, vector.backward(5, vector.POISON), pending)


def torch_case(folder: Path) -> Case:
    from app.settings import BaseModelSettings
    from tests.models import tiny_qwen3
    from tests.parity.datums import batch, policy, supervised
    from workers.backends.training import backends

    base = BaseModelSettings(
        name="tiny", path=str(tiny_qwen3(folder / "base")), dtype="float32", trainer={"backend": "torch"}
    )
    backend = backends.create(base)
    backend.open()
    datums = policy(2, (12, 25, 3))
    datums[1]["logprobs"][-1] = -1e4

    def good(number: int) -> ForwardBackward:
        return ForwardBackward(batch(supervised(number, (9, 14))), "cross_entropy")

    def pending(model: str) -> Any:
        return {name: gradient.tobytes() for name, gradient in backend.gradients(model).items()}

    return Case(backend, good, ForwardBackward(batch(datums), "importance_sampling"), pending)


@pytest.fixture(scope="module", params=[vector_case, torch_case])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return request.param(tmp_path_factory.mktemp("backend"))


@pytest.fixture
def models(case: Case) -> list[str]:
    """Two equal models, one step from their start, with a pending gradient."""
    for model in ("m1", "m2"):
        for op in (Create(SPEC), case.good(1), STEP, case.good(2)):
            case.apply(model, op)
    return ["m1", "m2"]


def test_the_same_ops_give_the_same_bits(case: Case, models: list[str], tmp_path: Path):
    assert case.picture("m1", tmp_path / "1") == case.picture("m2", tmp_path / "2")
    assert repr(case.apply("m1", case.good(3))) == repr(case.apply("m2", case.good(3)))


def test_each_batch_and_each_step_counts(case: Case, models: list[str], tmp_path: Path):
    seen = [case.picture("m1", tmp_path / "start")]
    for i, op in enumerate((case.good(3), case.good(3), STEP)):
        case.apply("m1", op)
        seen.append(case.picture("m1", tmp_path / str(i)))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_an_op_that_fails_leaves_the_state_as_it_was(case: Case, models: list[str], tmp_path: Path):
    assert isinstance(case.apply("m1", case.poison), UserOpError)
    assert case.picture("m1", tmp_path / "1") == case.picture("m2", tmp_path / "2")


def test_a_forward_changes_nothing(case: Case, models: list[str], tmp_path: Path):
    case.apply("m1", replace(case.good(3), forward_only=True))
    assert case.picture("m1", tmp_path / "1") == case.picture("m2", tmp_path / "2")


def test_a_step_or_a_drop_leaves_no_gradient(case: Case, models: list[str]):
    case.apply("m1", STEP)
    case.apply("m2", DropGradients())
    case.apply("m3", Create(SPEC))
    assert case.gradients("m1") == case.gradients("m2") == case.gradients("m3")


def test_what_was_saved_comes_back_without_its_pending_gradient(case: Case, models: list[str], tmp_path: Path):
    (tmp_path / "saved").mkdir()
    case.backend.capture("m1", optimizer=True)(tmp_path / "saved")
    case.apply("m1", DropGradients())
    expected = case.picture("m1", tmp_path / "expected")
    assert case.apply("m3", Create(LoraSpec(rank=2), tmp_path / "saved", optimizer=True)) == Done()
    assert case.apply("m2", Load(tmp_path / "saved", optimizer=True)) == Done()
    assert case.picture("m3", tmp_path / "3") == case.picture("m2", tmp_path / "2") == expected


def test_a_load_that_does_not_fit_changes_nothing(case: Case, models: list[str], tmp_path: Path):
    case.apply("m3", Create(LoraSpec(rank=2)))
    (tmp_path / "saved").mkdir()
    case.backend.capture("m3", optimizer=True)(tmp_path / "saved")
    for source in (tmp_path / "saved", tmp_path / "missing"):
        assert isinstance(case.apply("m1", Load(source, optimizer=True)), UserOpError)
    assert case.picture("m1", tmp_path / "1") == case.picture("m2", tmp_path / "2")


def test_a_closed_model_is_gone_and_closing_it_again_is_fine(case: Case, models: list[str], tmp_path: Path):
    for _ in range(2):
        case.backend.close("m1")
    case.apply("m1", Create(SPEC))
    case.apply("m3", Create(SPEC))
    assert case.picture("m1", tmp_path / "1") == case.picture("m3", tmp_path / "3")

"""One trainer on a tiny base model for all files here; every test makes its own models in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from app.domain.ops import ForwardBackward, LoraSpec
from app.domain.results import Done
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised
from tests.parity.reference import Reference
from tests.parity.training import LENGTHS, STEP, apply, open_trainer, reference_of
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

SPEC = LoraSpec(rank=4, seed=1)
_numbers = count()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def trainer(base: Path) -> Trainer:
    return open_trainer(base, "float32")


@pytest.fixture
def create(trainer: Trainer) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def make(spec: LoraSpec = SPEC, steps: int = 2) -> str:
        """Makes a model some steps from its start, where B is zero and half of the gradient with it."""
        made.append(f"model-{next(_numbers)}")
        assert apply(trainer, made[-1], Create(spec)) == Done()
        for seed in range(steps):
            apply(trainer, made[-1], ForwardBackward(batch(supervised(seed, LENGTHS)), "cross_entropy"))
            apply(trainer, made[-1], STEP)
        return made[-1]

    yield make
    for model in made:
        trainer.close(model)


@pytest.fixture
def model(create: Callable[..., str]) -> str:
    return create()


@pytest.fixture
def reference(trainer: Trainer, base: Path, model: str, tmp_path: Path) -> Reference:
    """Reference of `model` as it is when the test starts."""
    return reference_of(trainer, model, base, tmp_path / "peft")

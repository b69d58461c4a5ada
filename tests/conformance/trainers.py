"""Every training backend, with models of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import Done
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity.datums import batch, policy, supervised, valued
from workers.backends.training import backends
from workers.backends.training.base import ADAPTER_FILE, Create
from workers.backends.training.trainer import Trainer

OF_ADAPTERS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    **{f"zero-{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "nf4 torch": {"backend": "torch"},
}
OF_WEIGHTS: dict[str, dict[str, Any]] = {
    "full torch": {"backend": "torch"},
    "full zero-3": {"zero_stage": 3},
}
TRAINERS = {**OF_ADAPTERS, **OF_WEIGHTS}
of_adapters = pytest.mark.parametrize("backend", OF_ADAPTERS, indirect=True)
SPEC = LoraSpec(rank=4, seed=1)
STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))
VALUED = ForwardBackward(batch(valued(6, (9, 30, 4))), "ppo_critic")
GOOD = ForwardBackward(batch(supervised(1, (9, 30, 4))), "cross_entropy")
OTHER = ForwardBackward(batch(policy(2, (12, 25, 3))), "ppo")
_numbers = count()


def dtype_of(trainer: str) -> str:
    """The dtype of the base model of a trainer in TRAINERS."""
    return "nf4" if trainer.startswith("nf4") else "float32"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=TRAINERS)
def backend(request: pytest.FixtureRequest, base: Path) -> Iterator[Trainer]:
    torch.set_num_threads(1)
    trainer = {**TRAINERS[request.param], "micro_batch_tokens": 64}
    settings = BaseModelSettings(name="tiny", path=str(base), dtype=dtype_of(request.param), trainer=trainer)
    backend = backends.create(settings, full=request.param in OF_WEIGHTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", dict)  # no bf16: a quantised base computes in fp32
        backend.open()
    yield backend


@pytest.fixture
def weights_file(backend: Trainer) -> str:
    return "model.safetensors" if backend._full else ADAPTER_FILE


@pytest.fixture
def create(backend: Trainer) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def make(spec: LoraSpec = SPEC, **source: Any) -> str:
        """Makes a model some steps from its start, or as `source` says; of adapters alone also as `spec` says."""
        made.append(f"model-{next(_numbers)}")
        assert apply(backend, made[-1], Create(None if backend._full else spec, **source)) == Done()
        if "source" not in source:
            apply(backend, made[-1], VALUED if source.get("critic") else GOOD)
            apply(backend, made[-1], STEP)
        return made[-1]

    yield make
    for model in made:
        backend.close(model)


def apply(backend: Trainer, model: str, op: Any) -> Any:
    return backend.apply({model: op})[model]


def state(backend: Trainer, model: str, folder: Path) -> dict[str, bytes]:
    """Adapter, optimizer state and pending gradient, to the bit."""
    folder.mkdir(parents=True)
    backend.capture(model, optimizer=True)(folder)
    pending = {name: gradient.tobytes() for name, gradient in backend.gradients(model).items()}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | pending

"""A call for which memory is too small fails alone; a trainer that lost its device is broken."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from app.errors import NoMemory
from app.settings import BaseModelSettings
from tests.conformance.trainers import GOOD, SPEC, STEP, apply
from tests.models import tiny_qwen3
from workers.backends.training import backends, trainer
from workers.backends.training.base import Create
from workers.backends.training.engine import HiddenStates
from workers.backends.training.ranks import RankGroup
from workers.backends.training.trainer import Trainer

DRIVER = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def backend(tmp_path: Path) -> Trainer:
    settings = BaseModelSettings(
        name="tiny", path=str(tiny_qwen3(tmp_path / "base")), dtype="float32", trainer={"backend": "torch"}
    )
    backend = backends.create(settings)
    backend.open()
    apply(backend, "m", Create(SPEC))
    return backend


def fail(patch: pytest.MonkeyPatch, owner: object, name: str, error: Exception) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), DRIVER], ids=["allocator", "driver"])
def test_a_pass_for_which_memory_is_too_small_fails_alone_whoever_refused_it(
    error: Exception, backend: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, HiddenStates, "_run", error)
        assert isinstance(apply(backend, "m", GOOD), NoMemory)
    assert backend.healthy()
    assert not isinstance(apply(backend, "m", GOOD), Exception)


def test_a_trainer_that_lost_its_device_is_broken(backend: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, HiddenStates, "_run", LOST)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        apply(backend, "m", GOOD)
    assert not backend.healthy()


def test_a_trainer_that_lost_another_rank_is_broken(backend: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as rank:
        ranks = RankGroup(siblings=(psutil.Process(rank.pid),))
        monkeypatch.setattr(backend, "_engine", replace(backend._engine, ranks=ranks))
        assert backend.healthy()
        rank.kill()
        rank.wait()
        assert not backend.healthy()


@pytest.mark.parametrize(("error", "healthy"), [(DRIVER, True), (LOST, False)], ids=["full", "lost"])
def test_a_device_without_memory_is_not_lost_wherever_it_is_noticed(
    error: Exception, healthy: bool, backend: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(backend, "m", GOOD)
    fail(monkeypatch, trainer, "step_all", error)
    with pytest.raises(torch.AcceleratorError):
        apply(backend, "m", STEP)
    assert backend.healthy() is healthy


def test_pinned_memory_is_freed_for_other_processes_with_the_gpus(
    backend: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps it for its own later tensors: 39 GB after one datum of 131,072 tokens of an 8B model."""
    freed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: freed.append("host"), raising=False)
    backend.free_memory()
    assert freed == ["device", "host"]

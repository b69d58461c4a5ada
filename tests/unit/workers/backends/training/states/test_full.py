"""The engine's copy of a fully fine-tuned model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from app.domain.ops import AdamParams, ForwardBackward, OptimStep
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised
from workers.backends.training import backends
from workers.backends.training.base import Create
from workers.models.full_weights import tensors_in


def test_a_copy_that_ends_midway_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a mixture of two versions."""
    settings = BaseModelSettings(name="tiny", path=str(tiny_qwen3(tmp_path / "base")), trainer={"backend": "torch"})
    backend = backends.create(settings, full=True)
    backend.open()
    backend.apply({"a": Create(None)})
    backend.apply({"a": ForwardBackward(batch(supervised(1, [8])), "cross_entropy")})
    state, written = backend._states["a"], []

    def write(self: object, parameter: nn.Parameter, value: torch.Tensor, owner: int) -> None:
        written.append(value)
        if len(written) == 3:
            raise RuntimeError("the device is gone")
        parameter.data.copy_(value)

    monkeypatch.setattr(type(backend._engine), "write", write)
    with pytest.raises(RuntimeError, match="gone"):
        backend.apply({"a": OptimStep(AdamParams(learning_rate=0.1))})
    backend.capture("a", optimizer=False)(tmp_path)
    for name, found in tensors_in(tmp_path):
        assert torch.equal(found, state.masters[name].to(found.dtype)), name

"""The devices with fused kernels. `tests/parity/test_fused.py` shows what they compute."""

from __future__ import annotations

import pytest
import torch

from workers.models import fused


def test_a_cpu_has_no_fused_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert not fused.usable(torch.device("cpu"))
    assert not caplog.records


def test_kernels_that_cannot_run_are_left_out_with_the_cause_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """Here torch is built without CUDA."""
    assert not fused.usable(torch.device("cuda"))
    assert "CUDA" in caplog.text
    assert "apt install gcc python3-dev" in caplog.text


def test_without_liger_kernel_there_are_none(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not fused.usable(torch.device("cuda"))
    assert not caplog.records

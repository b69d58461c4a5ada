"""The devices with fused kernels. `tests/parity/test_fused.py` shows what they compute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from liger_kernel.transformers.model import output_classes
from transformers.integrations import liger
from transformers.models.qwen3 import modeling_qwen3

from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.backends.training import backends
from workers.models import fused


@pytest.mark.parametrize(
    ("case", "setting", "layers"), [("qwen3", True, 1), ("qwen3", False, 0), ("helium (unlisted)", True, 0)]
)
def test_a_trainer_runs_them_in_head_and_layers_if_the_setting_and_the_architecture_allow_it(
    case: str, setting: bool, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    monkeypatch.setattr(fused, "usable", lambda device: True)
    monkeypatch.setattr(fused, "fuse", models.append)
    base = str(architectures.build(case, tmp_path))
    trainer = backends.create(
        BaseModelSettings(
            name="tiny", path=base, dtype="float32", trainer={"backend": "torch", "fused_kernels": setting}
        )
    )
    trainer.open()
    assert models == [trainer._engine.base.model] * layers
    assert trainer.describe()["fused_kernels"] == setting
    if layers:
        with trainer._engine.head() as head:
            assert head.fused


def test_a_cpu_has_no_fused_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert not fused.usable(torch.device("cpu"))
    assert not caplog.records


def test_kernels_that_cannot_run_are_left_out_with_the_cause_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """Here torch is built without CUDA."""
    assert not fused.usable(torch.device("cuda"))
    assert "CUDA" in caplog.text
    assert "apt install gcc python3-dev" in caplog.text


def test_without_liger_kernel_there_are_none_and_the_log_says_how_to_install_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not fused.usable(torch.device("cuda"))
    assert len(caplog.records) == 1
    assert "pip install liger-kernel" in caplog.text


def test_qwen3_vl_has_them_also_if_transformers_lacks_a_class_that_liger_kernel_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(output_classes, "LigerQwen3VLCausalLMOutputWithPast", raising=False)
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers.model.qwen3_vl", raising=False)
    assert fused.fuse(architectures.random_model(architectures.config_of("qwen3-vl")))


def test_kernels_that_do_not_go_with_the_installed_transformers_leave_the_model_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", print)
        raise ImportError("cannot import name 'Output'")

    monkeypatch.setattr(liger, "apply_liger_kernel", fail)
    plain = modeling_qwen3.apply_rotary_pos_emb
    assert not fused.fuse(architectures.random_model(architectures.config_of("qwen3")))
    assert modeling_qwen3.apply_rotary_pos_emb is plain
    assert "cannot import name 'Output'" in caplog.text

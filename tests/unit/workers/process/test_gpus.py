"""A worker reports the GPUs that it sees, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.process.gpus import Gpus

ROWS = "0, GPU-a, 1024, 81559, 50\n1, GPU-b, 2048, 81559, 100\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{ROWS}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def found() -> dict[str, dict[str, float]]:
    return {
        metric.name.removeprefix("tinsmith_gpu_"): {sample.labels["gpu"]: sample.value for sample in metric.samples}
        for metric in Gpus().collect()
    }


def test_each_gpu_has_its_memory_and_its_utilization(smi: Path):
    assert found() == {
        "memory_used_bytes": {"0": 2**30, "1": 2**31},
        "memory_bytes": {"0": 81559 * 2**20, "1": 81559 * 2**20},
        "utilization_ratio": {"0": 0.5, "1": 1.0},
    }


@pytest.mark.parametrize(("visible", "numbers"), [("1", {"1"}), ("GPU-a", {"0"}), ("0,1", {"0", "1"}), ("", set())])
def test_a_worker_reports_the_gpus_it_sees(smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, numbers: set[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert set(found()["memory_bytes"]) == numbers


def test_two_scrapes_at_once_ask_the_driver_once(smi: Path):
    gpus = Gpus()
    list(gpus.collect())
    smi.unlink()
    assert [len(metric.samples) for metric in gpus.collect()] == [2, 2, 2]


@pytest.mark.parametrize("script", ["exit 9", "echo Failed to initialize NVML", "echo 0, GPU-a, '[N/A]', 8, 1"])
def test_without_an_answer_of_the_driver_there_is_no_gpu(smi: Path, script: str):
    smi.write_text(f"#!/bin/sh\n{script}\n")
    assert found()["memory_bytes"] == {}
    smi.unlink()
    assert found()["memory_bytes"] == {}

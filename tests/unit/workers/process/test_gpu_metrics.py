"""A worker reports the GPUs that it sees, and only those."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from workers.process.gpu_metrics import GpuMetrics

ROWS = "0, GPU-a1, 1024, 81559, 50\n1, GPU-b2, 2048, 81559, 100\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{ROWS}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def reported(gpus: GpuMetrics) -> dict[str, dict[str, float]]:
    return {
        metric.name.removeprefix("tinsmith_gpu_"): {sample.labels["gpu"]: sample.value for sample in metric.samples}
        for metric in gpus.collect()
    }


def found() -> dict[str, dict[str, float]]:
    gpus = GpuMetrics()
    gpus.sample()
    return reported(gpus)


def threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("gpus")


def test_each_gpu_has_its_memory_and_its_utilization(smi: Path):
    assert found() == {
        "memory_used_bytes": {"0": 2**30, "1": 2**31},
        "memory_bytes": {"0": 81559 * 2**20, "1": 81559 * 2**20},
        "utilization_ratio": {"0": 0.5, "1": 1.0},
    }


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        *(("1", {"1"}), ("GPU-a1", {"0"}), ("0,1", {"0", "1"}), ("", set())),
        *(("0, 1", {"0", "1"}), ("GPU-b", {"1"}), (" GPU-a , GPU-b2", {"0", "1"}), ("GPU-c,", set())),
    ],
)
def test_a_worker_reports_the_gpus_it_sees(smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, numbers: set[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert set(found()["memory_bytes"]) == numbers


def test_a_scrape_never_asks_the_driver_which_may_hang(smi: Path):
    gpus = GpuMetrics()
    assert reported(gpus)["memory_bytes"] == {}
    gpus.sample()
    smi.unlink()
    assert [set(values) for values in reported(gpus).values()] == [{"0", "1"}] * 3


def test_values_of_a_driver_that_hangs_are_dropped_after_a_minute(smi: Path):
    now = 1000.0
    gpus = GpuMetrics(lambda: now)
    gpus.sample()
    now += 59
    assert reported(gpus)["memory_bytes"].keys() == {"0", "1"}
    now += 2
    assert reported(gpus)["memory_bytes"] == {}


def test_one_thread_samples_where_there_is_a_driver(smi: Path):
    before = threads()
    gpus = GpuMetrics()
    gpus.start()
    assert threads() == before + 1
    for _ in range(3000):
        if reported(gpus)["memory_bytes"]:
            break
        time.sleep(0.01)
    assert reported(gpus)["memory_bytes"].keys() == {"0", "1"}
    smi.unlink()
    GpuMetrics().start()
    assert threads() == before + 1


def test_a_gpu_with_an_unknown_value_does_not_hide_the_others(smi: Path):
    smi.write_text("#!/bin/sh\nprintf '0, GPU-a1, 1024, 81559, [N/A]\\n1, GPU-b2, 2048, 81559, 100\\n'\n")
    assert found()["utilization_ratio"] == {"1": 1.0}


@pytest.mark.parametrize("script", ["exit 9", "echo Failed to initialize NVML", "echo 0, GPU-a, '[N/A]', 8, 1"])
def test_without_an_answer_of_the_driver_there_is_no_gpu(smi: Path, script: str):
    smi.write_text(f"#!/bin/sh\n{script}\n")
    assert found()["memory_bytes"] == {}
    smi.unlink()
    assert found()["memory_bytes"] == {}

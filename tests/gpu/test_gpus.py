"""The metrics of a GPU are what PyTorch knows of it."""

from __future__ import annotations

import pytest
import torch


def test_a_gpus_memory_is_reported_by_the_real_nvidia_smi() -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client, for a worker's metrics")
    from tests.unit.workers.process.test_gpu_metrics import found

    held = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    gpus = found()
    assert len(gpus["memory_bytes"]) == torch.cuda.device_count()
    total = torch.cuda.get_device_properties(0).total_memory
    assert next(iter(gpus["memory_bytes"].values())) == pytest.approx(total, rel=0.05)
    assert next(iter(gpus["memory_used_bytes"].values())) >= held.numel()

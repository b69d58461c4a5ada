"""The device that is checked: `python -m ops.gpu_check.device` prints its facts as one line of JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from ops.bench import timing
from workers.backends.devices import have_bfloat16

_ROUNDS = 5
# Dense bf16 FLOP/s of NVIDIA's datasheets, by torch's name of the device: half of the figure with sparsity, where only
# that is given (H100 PCIe 1,513 TFLOPS, H100 NVL 1,671, HGX B200 4,500).
_PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finish() -> None:
    """Waits for the device."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def facts() -> dict[str, Any]:
    """Its name and memory, and FLOP/s: of a bf16 product of square matrices, and of the datasheet where it is known."""
    if device().type == "cpu":
        return {"name": "cpu", "product_flops": _product_flops(512), "datasheet_flops": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": properties.total_memory / 2**30,
        "capability": f"{properties.major}.{properties.minor}",
        "bfloat16": have_bfloat16(),
        "cuda": torch.version.cuda,
        "product_flops": _product_flops(8192),
        **datasheet(properties.name),
    }


def datasheet(name: str) -> dict[str, Any]:
    """The datasheet's FLOP/s of a GPU; for one that is not listed, the reason why its MFU is unknown."""
    if name in _PEAKS:
        return {"datasheet_flops": _PEAKS[name]}
    return {"datasheet_flops": None, "mfu": f"unknown: _PEAKS in ops/gpu_check/device.py has no {name!r}; add its peak"}


def _product_flops(width: int) -> float:
    one, other = (torch.randn(width, width, dtype=torch.bfloat16, device=device()) for _ in range(2))

    def product() -> None:
        torch.mm(one, other)
        finish()

    product()
    return 2 * width**3 / (min(timing.timed_ms(product) for _ in range(_ROUNDS)) / 1000)


if __name__ == "__main__":
    print(json.dumps(facts()))

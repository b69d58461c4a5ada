"""Memory and utilization of the GPUs of this process, by nvidia-smi, as Prometheus metrics."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_QUERY = (
    *("nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu"),
    "--format=csv,noheader,nounits",
)
# nvidia-smi takes a tenth of a second to some seconds, and several servers may scrape one worker.
_KEPT_S = 5.0
# Prometheus waits 10 s for all metrics of a worker.
_LONGEST_S = 5.0


class _Gpu(NamedTuple):
    number: str
    used_bytes: int
    total_bytes: int
    utilization: float


class Gpus(Collector):
    """The metrics of the GPUs that this process sees (CUDA_VISIBLE_DEVICES); none without nvidia-smi."""

    def __init__(self) -> None:
        self._found: list[_Gpu] = []
        self._looked = float("-inf")

    def describe(self) -> tuple[GaugeMetricFamily, ...]:
        """The metrics without values."""
        labels = ["gpu"]
        return (
            GaugeMetricFamily(
                "tinsmith_gpu_memory_used_bytes", "Memory in use on a GPU, by all processes", labels=labels
            ),
            GaugeMetricFamily("tinsmith_gpu_memory_bytes", "Memory of a GPU", labels=labels),
            GaugeMetricFamily(
                "tinsmith_gpu_utilization_ratio", "Share of the last moment in which a kernel ran", labels=labels
            ),
        )

    def collect(self) -> Iterator[Metric]:
        if time.monotonic() - self._looked > _KEPT_S:
            self._found, self._looked = _gpus(), time.monotonic()
        used, total, utilization = self.describe()
        for gpu in self._found:
            used.add_metric([gpu.number], gpu.used_bytes)
            total.add_metric([gpu.number], gpu.total_bytes)
            utilization.add_metric([gpu.number], gpu.utilization)
        yield from (used, total, utilization)


def _gpus() -> list[_Gpu]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        told = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_LONGEST_S).stdout
        rows = [[part.strip() for part in line.split(",")] for line in told.splitlines()]
        mine = None if visible is None else visible.split(",")
        return [
            _Gpu(number, int(used) * 2**20, int(total) * 2**20, float(busy) / 100)
            for number, uuid, used, total, busy in rows
            if mine is None or not {number, uuid}.isdisjoint(mine)
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []

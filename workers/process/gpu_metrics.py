"""Memory and utilization of the GPUs of this process, by nvidia-smi, as Prometheus metrics."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.stack.hardware import is_named

_QUERY = (
    *("nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu"),
    "--format=csv,noheader,nounits",
)
_EVERY_S = 15.0
_KEPT_S = 60.0
# nvidia-smi takes a tenth of a second to some seconds.
_LONGEST_S = 30.0


class _Gpu(NamedTuple):
    number: str
    uuid: str
    used_bytes: int
    total_bytes: int
    utilization: float


class GpuMetrics(Collector):
    """The metrics of the GPUs that this process sees (CUDA_VISIBLE_DEVICES); none without nvidia-smi.

    A thread asks the driver, and a scrape reads its newest answer. A scrape is also the liveness probe of a worker, so
    a driver that is slow or hangs must not delay it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: tuple[float, list[_Gpu]] = (0.0, [])

    def start(self) -> None:
        """Starts the thread, if there is nvidia-smi."""
        if shutil.which(_QUERY[0]):
            threading.Thread(target=self._loop, name="gpus", daemon=True).start()

    def sample(self) -> None:
        """Asks the driver once."""
        gpus = _gpus()
        self._newest = self._clock(), gpus

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
        sampled, gpus = self._newest
        used, total, utilization = self.describe()
        for gpu in gpus if self._clock() - sampled <= _KEPT_S else ():
            used.add_metric([gpu.number], gpu.used_bytes)
            total.add_metric([gpu.number], gpu.total_bytes)
            utilization.add_metric([gpu.number], gpu.utilization)
        yield from (used, total, utilization)

    def _loop(self) -> None:
        while True:
            self.sample()
            time.sleep(_EVERY_S)


def _gpus() -> list[_Gpu]:
    try:
        listing = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_LONGEST_S).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    gpus = [gpu for line in listing.splitlines() if (gpu := _parsed(line))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    ids = [id_.strip() for id_ in visible.split(",")]
    return [gpu for gpu in gpus if any(is_named(id_, gpu.number, gpu.uuid) for id_ in ids)]


def _parsed(line: str) -> _Gpu | None:
    """The GPU of a row; None if the driver does not know one of its values."""
    try:
        number, uuid, used, total, busy = (part.strip() for part in line.split(","))
        return _Gpu(number, uuid, int(used) * 2**20, int(total) * 2**20, float(busy) / 100)
    except ValueError:
        return None

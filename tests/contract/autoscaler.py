"""An autoscaler for plain processes that does as KEDA: it reads the metrics that the chart's ScaledObjects name.

It starts as many of the chart's workers of a role as the metrics ask for. It ends a worker with SIGTERM when it was not
needed for a while.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from app.settings import METRICS_PORT_VARIABLE

_POLL_S = 0.2
_ENDS_WITHIN_S = 120
# In the log of a worker that serves. Before, its SIGTERM ends it at once.
_SERVES = b" ready."


@dataclass(frozen=True)
class Trigger:
    """A trigger of a ScaledObject: a metric, the value above which it is active, and the value for each worker."""

    name: str
    labels: Mapping[str, str]
    above: float
    each: float

    @classmethod
    def of(cls, trigger: Mapping[str, Any]) -> Trigger:
        metadata = trigger["metadata"]
        assert trigger["metricType"] == "AverageValue"
        match = re.fullmatch(r"(\w+)\{(.*)\}", metadata["valueLocation"])
        assert match is not None
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        return cls(match[1], labels, float(metadata["activationTargetValue"]), float(metadata["targetValue"]))

    def workers(self, metrics: str) -> int:
        """The number of workers that it asks for; 0 while it is not active. A missing value is a fault, as it is to
        KEDA."""
        samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
        (value,) = [one.value for one in samples if (one.name, one.labels) == (self.name, self.labels)]
        return math.ceil(value / self.each) if value > self.above else 0


@dataclass
class Pod:
    """A place of a workload, with at most one process."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    needed_at: float = 0.0
    log_start: int = 0


@dataclass
class Workload:
    """A workload of the chart. As in a StatefulSet, the last pods are the first that end."""

    command: list[str]
    triggers: list[Trigger]
    pods: list[Pod]

    @property
    def running(self) -> int:
        return sum(pod.process is not None for pod in self.pods)


@dataclass
class Autoscaler:
    """`starts` counts the starts of each workload, `most` its processes at one time, and `codes` has the exit codes of
    the ended ones that served."""

    url: str
    environ: Mapping[str, str]
    logs: Path
    cool_down_s: float
    workloads: dict[str, Workload] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    codes: list[int] = field(default_factory=list)

    def add(self, name: str, container: Mapping[str, Any], scaled: Mapping[str, Any]) -> None:
        """Adds the workload of a rendered container, which its ScaledObject scales."""
        python, *rest = container["command"]
        spec = scaled["spec"]
        assert (python, spec["minReplicaCount"], rest[-2]) == ("python", 0, "--name")
        pods = [Pod(f"{rest[-1]}-{number}") for number in range(spec["maxReplicaCount"])]
        self.workloads[name] = Workload([sys.executable, *rest[:-1]], list(map(Trigger.of, spec["triggers"])), pods)

    @property
    def running(self) -> set[str]:
        return {name for name, workload in self.workloads.items() if workload.running}

    def run(self, until: threading.Event) -> None:
        """Scales until the event is set; then ends what runs."""
        try:
            while not until.wait(_POLL_S):
                with suppress(OSError):  # the API is being replaced: KEDA leaves the number as it is
                    metrics = urllib.request.urlopen(f"{self.url}/metrics", timeout=60).read().decode()
                    for name, workload in self.workloads.items():
                        self._scale(name, workload, metrics)
        finally:
            for workload in self.workloads.values():
                for pod in workload.pods:
                    self._end(pod)

    def _scale(self, name: str, workload: Workload, metrics: str) -> None:
        now = time.monotonic()
        needed = max(trigger.workers(metrics) for trigger in workload.triggers)
        for pod in workload.pods[:needed]:
            pod.needed_at = now
            if pod.process is None:
                self.starts[name] += 1
                pod.process = self._start(pod, workload.command)
        for pod in workload.pods[needed:]:
            # KEDA waits longer than any start takes.
            if now - pod.needed_at > self.cool_down_s and self._has_served(pod):
                self._end(pod)
        self.most[name] = max(self.most[name], workload.running)

    def _start(self, pod: Pod, command: list[str]) -> subprocess.Popen[bytes]:
        """Pods have hosts of their own, and so the same names and ports; here each process has others."""
        environ = {**os.environ, **self.environ, METRICS_PORT_VARIABLE: "0"}
        with self._log(pod).open("ab") as log:
            pod.log_start = log.tell()
            return subprocess.Popen([*command, pod.name], env=environ, stdout=log, stderr=log)

    def _end(self, pod: Pod) -> None:
        if pod.process is not None:
            pod.process.terminate()
            code = pod.process.wait(_ENDS_WITHIN_S)
            if code != -signal.SIGTERM or self._has_served(pod):
                self.codes.append(code)
            pod.process = None

    def _has_served(self, pod: Pod) -> bool:
        return pod.process is not None and self._log(pod).read_bytes().find(_SERVES, pod.log_start) >= 0

    def _log(self, pod: Pod) -> Path:
        return self.logs / f"{pod.name}.log"

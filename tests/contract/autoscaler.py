"""An autoscaler for plain processes that does as KEDA: it reads the metrics that the chart's ScaledObjects name.

It starts the chart's worker of a role when something waits for it. It ends the worker with SIGTERM when nothing did for
a while.
"""

from __future__ import annotations

import os
import re
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

_POLL_S = 0.2
_ENDS_WITHIN_S = 120


@dataclass(frozen=True)
class Trigger:
    """A trigger of a ScaledObject: a metric, and the value above which it is active."""

    name: str
    labels: Mapping[str, str]
    above: float

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Trigger:
        match = re.fullmatch(r"(\w+)\{(.*)\}", metadata["valueLocation"])
        assert match is not None
        return cls(match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2])), float(metadata["activationTargetValue"]))

    def is_active(self, metrics: str) -> bool:
        """A missing value is a fault, as it is to KEDA."""
        samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
        (value,) = [one.value for one in samples if (one.name, one.labels) == (self.name, self.labels)]
        return value > self.above


@dataclass
class Workload:
    """A workload of the chart with at most one process."""

    command: list[str]
    triggers: list[Trigger]
    process: subprocess.Popen[bytes] | None = None
    active_at: float = 0.0


@dataclass
class Autoscaler:
    """`starts` counts the starts of each workload, and `codes` has the exit codes of the ended ones."""

    url: str
    environ: Mapping[str, str]
    logs: Path
    cool_down_s: float
    workloads: dict[str, Workload] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    codes: list[int] = field(default_factory=list)

    def add(self, name: str, container: Mapping[str, Any], scaled: Mapping[str, Any]) -> None:
        """Adds the workload of a rendered container, which its ScaledObject scales."""
        python, *rest = container["command"]
        assert (python, scaled["spec"]["minReplicaCount"]) == ("python", 0)
        triggers = [Trigger.of(trigger["metadata"]) for trigger in scaled["spec"]["triggers"]]
        self.workloads[name] = Workload([sys.executable, *rest], triggers)

    @property
    def running(self) -> set[str]:
        return {name for name, workload in self.workloads.items() if workload.process is not None}

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
                self._end(workload)

    def _scale(self, name: str, workload: Workload, metrics: str) -> None:
        now = time.monotonic()
        if any(trigger.is_active(metrics) for trigger in workload.triggers):
            workload.active_at = now
            if workload.process is None:
                self.starts[name] += 1
                with (self.logs / f"{name}.log").open("ab") as log:
                    environ = {**os.environ, **self.environ}
                    workload.process = subprocess.Popen(workload.command, env=environ, stdout=log, stderr=log)
        elif now - workload.active_at > self.cool_down_s:
            self._end(workload)

    def _end(self, workload: Workload) -> None:
        if workload.process is not None:
            workload.process.terminate()
            self.codes.append(workload.process.wait(_ENDS_WITHIN_S))
            workload.process = None

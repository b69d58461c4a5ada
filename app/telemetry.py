"""Logs as JSON lines and metrics for Prometheus: one format and one registry for every process.

A log line may carry the fields named in `LOG_FIELDS`, passed through `extra`. Keys, prompts and payloads are never
passed to a logger.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.errors import Unavailable
from app.stores.redis.types import Pending, Waiting

LOG_FIELDS = ("request_id", "model_id", "seq", "epoch", "applied", "waited_s", "run_s", "commit_s", "ops_in_pass")

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
# Of these, the least value of all processes is shown; the others are added up.
_NOT_SUMS = ("process_start_time_seconds", "process_max_fds")

ADMISSIONS = Counter("tinsmith_admissions", "Futures admitted", ["kind"], registry=REGISTRY)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
REQUEST_SECONDS = Histogram(
    "tinsmith_request_seconds", "Time to answer a request", ["route", "status"], registry=REGISTRY, buckets=_SECONDS
)
HELD_POLLS = Gauge(
    "tinsmith_held_polls", "Long polls that are held now", registry=REGISTRY, multiprocess_mode="livesum"
)
ADMIT_SECONDS = Histogram(
    "tinsmith_admit_seconds",
    "Time to journal a call and dispatch it",
    ["kind"],
    registry=REGISTRY,
    buckets=_SECONDS,
)
POLL_SECONDS = Histogram(
    "tinsmith_poll_seconds",
    "Time that a poll, or an answer of the OpenAI or Anthropic API, is held",
    registry=REGISTRY,
    buckets=(*_SECONDS, 60),
)
ERRORS = Counter(
    "tinsmith_errors", "Requests answered with an error, by the error's kind", ["status", "error"], registry=REGISTRY
)
# The API and the workers use object stores, so these two are in both registries.
STORE_SECONDS = Histogram(
    "tinsmith_object_store_seconds",
    "Time of a call to the object store, with its retries",
    ["operation"],
    registry=REGISTRY,
    buckets=(*_SECONDS, 100, 300),
)
STORE_OUTAGES = Counter(
    "tinsmith_object_store_outages", "Calls that failed because the object store was away or full", registry=REGISTRY
)
for _shared in (STORE_SECONDS, STORE_OUTAGES):
    prometheus_client.REGISTRY.register(_shared)


@contextmanager
def store_call(operation: str) -> Iterator[None]:
    """Measures a call to the object store; also a decorator."""
    with STORE_SECONDS.labels(operation).time(), STORE_OUTAGES.count_exceptions(Unavailable):
        yield


class Queues(Collector):
    """The queues' metrics. They have the same values in every process, so they are not gauges of prometheus_client,
    which keeps the gauges of each process apart."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, ...], float]] = []
        self._labels = ["queue"]
        self._backlogs: Mapping[tuple[str, str], Waiting] = {}

    def set(
        self,
        pending: Sequence[Pending],
        backlogs: Mapping[tuple[str, str], Waiting],
        projects: Sequence[str] | None = None,
    ) -> None:
        """Replaces the values. `backlogs` is by role and base model. With `projects`, those of `pending`, depth and age
        of a queue have a value for each project."""
        queues = [one.queue for one in pending]
        places = zip(queues, strict=True) if projects is None else zip(queues, projects, strict=True)
        self._labels = ["queue"] if projects is None else ["queue", "project"]
        self._waiting = list(zip(places, [one.waited_s for one in pending], strict=True))
        self._backlogs = backlogs

    def describe(self) -> tuple[GaugeMetricFamily, ...]:
        """The metrics without values."""
        depth = GaugeMetricFamily(
            "tinsmith_queue_depth", "Models and sampling requests with waiting calls", labels=self._labels
        )
        age = GaugeMetricFamily(
            "tinsmith_queue_age_seconds", "Longest time for which one of these made no progress", labels=self._labels
        )
        labels = ["base_model", "role"]
        backlog = GaugeMetricFamily(
            "tinsmith_backlog", "Models and sampling requests that need a worker of the role, also 0", labels=labels
        )
        backlog_age = GaugeMetricFamily(
            "tinsmith_backlog_age_seconds", "Longest time for which one of these made no progress", labels=labels
        )
        return depth, age, backlog, backlog_age

    def collect(self) -> Iterator[Metric]:
        depth, age, backlog, backlog_age = self.describe()
        depths, ages = Counts[tuple[str, ...]](), dict[tuple[str, ...], float]()
        for place, seconds in self._waiting:
            depths[place] += 1
            ages[place] = max(ages.get(place, 0.0), seconds)
        for place, seconds in ages.items():
            depth.add_metric(place, depths[place])
            age.add_metric(place, seconds)
        # Each role has a value: an autoscaler takes a missing one for a fault.
        for (role, base_model), its in self._backlogs.items():
            backlog.add_metric([base_model, role], its.number)
            backlog_age.add_metric([base_model, role], its.oldest_s)
        yield from (depth, age, backlog, backlog_age)


QUEUES = Queues()
REGISTRY.register(QUEUES)


class _Processes(Collector):
    """The process metrics (CPU time, memory, files), added up over all processes of this API. `folder` is that of
    prometheus_client, with files of each process."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def collect(self) -> Iterator[Metric]:
        pids = [int(file.stem.rpartition("_")[2]) for file in self._folder.glob("gauge_livesum_*.db")]
        found = [ProcessCollector(pid=partial(int, pid), registry=None).collect() for pid in pids]
        for families in zip(*filter(None, found), strict=True):
            values = [family.samples[0].value for family in families]
            name = families[0].samples[0].name
            value = min(values) if name in _NOT_SUMS else sum(values)
            family = Metric(families[0].name, families[0].documentation, families[0].type)
            family.add_sample(name, {}, value)
            yield family


def exposition() -> bytes:
    """The metrics as Prometheus reads them; those of all processes of this API, if it has several."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return generate_latest(REGISTRY)
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged, folder)  # type: ignore[no-untyped-call]
    merged.register(QUEUES)
    merged.register(_Processes(folder))
    return generate_latest(merged)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line: time, level, logger, message, the ids, and the traceback if
    there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class WithoutRequests(logging.Filter):
    """Removes the request text that gunicorn logs for a request it cannot read: a header without its colon may hold a
    key."""

    _SAID = re.compile(r"(Invalid request from ip=\S+): .*", re.DOTALL)

    def filter(self, record: logging.LogRecord) -> bool:
        said = self._SAID.fullmatch(record.getMessage())
        if said:
            record.msg, record.args = said[1], None
        return True


class WithoutTasks(logging.Filter):
    """Removes Celery's lines about tasks, except failures. A worker logs each Op itself, and a worker without work
    still gets several ticks a minute."""

    _LOGGERS = ("celery.worker.strategy", "celery.app.trace")

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.name not in self._LOGGERS


def configure_logging() -> None:
    """Sends the output of every logger of this process through one JSON handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)

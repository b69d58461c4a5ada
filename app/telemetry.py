"""Logs as JSON lines and metrics for Prometheus: one format and one registry for every process.

A log line may carry the fields named in `LOG_FIELDS`, passed through `extra`. Keys, prompts and payloads are never
passed to a logger.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from app.stores.redis.types import Pending

LOG_FIELDS = ("request_id", "model_id", "seq", "epoch", "applied", "waited_s", "run_s", "commit_s", "ops_in_pass")

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

ADMISSIONS = Counter("tinsmith_admissions", "Futures admitted", ["kind"], registry=REGISTRY)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
REQUEST_SECONDS = Histogram(
    "tinsmith_request_seconds", "Time to answer a request", ["route", "status"], registry=REGISTRY, buckets=_SECONDS
)
HELD_POLLS = Gauge("tinsmith_held_polls", "Polls that wait for their future now", registry=REGISTRY)
QUEUE_DEPTH = Gauge("tinsmith_queue_depth", "Models and sampling requests that wait", ["queue"], registry=REGISTRY)
QUEUE_AGE = Gauge("tinsmith_queue_age_seconds", "Longest time without progress", ["queue"], registry=REGISTRY)


def set_queues(pending: Iterable[Pending]) -> None:
    """Replaces the values of the queue gauges."""
    QUEUE_DEPTH.clear()
    QUEUE_AGE.clear()
    ages: dict[str, float] = {}
    for waiting in pending:
        QUEUE_DEPTH.labels(waiting.queue).inc()
        ages[waiting.queue] = max(ages.get(waiting.queue, 0.0), waiting.waited_s)
    for queue, age in ages.items():
        QUEUE_AGE.labels(queue).set(age)


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


def configure_logging(level: int = logging.INFO, stream: TextIO = sys.stderr) -> None:
    """Sends the output of every logger of this process through one JSON handler."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)

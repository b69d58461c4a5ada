"""Reads the metrics that a client records for its runs: events named `metrics` in the SDK's telemetry."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from app.domain.progress import MOST_METRICS, Recorded
from app.errors import BadRequest

_GENERIC, _METRICS = "GENERIC_EVENT", "metrics"
_MOST_EVENTS = 100
"""The SDK sends at most so many events at a time."""
_MOST_NAME, _MOST_NAMES, _MOST_ID, _MOST_STEP = 64, 512, 512, 2**31 - 1


def recorded(body: Any) -> Mapping[str, list[Recorded]]:
    """The metrics of each run, in their order. All other events are dropped: they may hold API keys and tracebacks.
    Raises BadRequest for metrics that cannot be kept."""
    found: defaultdict[str, list[Recorded]] = defaultdict(list)
    for event_id, data in _metrics(body):
        model_id = data.get("model_id")
        if not isinstance(model_id, str) or not 1 <= len(model_id) <= _MOST_ID:
            raise BadRequest("model_id of an event 'metrics' is missing: give the id of the run")
        found[model_id].append(Recorded(_step(data.get("step")), dict(_values(data.get("metrics"))), event_id))
    if sum(map(len, found.values())) > _MOST_EVENTS:
        raise BadRequest(f"there are more than {_MOST_EVENTS} events 'metrics': send fewer at a time")
    return found


def _metrics(body: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The id and the data of each event."""
    events = body.get("events") if isinstance(body, dict) else None
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and (event.get("event"), event.get("event_name")) == (_GENERIC, _METRICS):
            id_, data = event.get("event_id"), event.get("event_data")
            id_ = id_ if isinstance(id_, str) and len(id_) <= _MOST_ID and id_.isprintable() else ""
            yield id_, data if isinstance(data, dict) else {}


def _step(step: Any) -> int:
    if type(step) is not int or not 0 <= step <= _MOST_STEP:
        raise BadRequest(f"step of an event 'metrics' is {step!r:.80}: give a whole number from 0 to {_MOST_STEP}")
    return step


def _values(metrics: Any) -> Iterator[tuple[str, float]]:
    """The finite values. JSON has no NaN, and the SDK sends null in its place."""
    if not isinstance(metrics, dict) or not 1 <= len(metrics) <= MOST_METRICS:
        raise BadRequest(f"metrics of an event 'metrics' must be 1 to {MOST_METRICS} numbers by name")
    if sum(map(len, metrics)) > _MOST_NAMES:
        raise BadRequest(f"the names of metrics of an event 'metrics' have more than {_MOST_NAMES} characters in all")
    for name, value in metrics.items():
        if not 1 <= len(name) <= _MOST_NAME or not name.isprintable():
            raise BadRequest(f"{name[:80]!r} is no name of a metric: give 1 to {_MOST_NAME} printable characters")
        if value is not None and type(value) not in (int, float):
            raise BadRequest(f"the metric {name!r} is {value!r:.80}: give a number")
        number = _finite(value)
        if number is not None:
            yield name, number


def _finite(value: float | None) -> float | None:
    """The value in six digits, as those of training are kept; None if it is not finite."""
    if value is None:
        return None
    try:
        number = float(f"{value:.6g}")
    except OverflowError:
        return None
    return number if math.isfinite(number) else None

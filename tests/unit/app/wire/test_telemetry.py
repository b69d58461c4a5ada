"""Of a client's telemetry only the events named `metrics` are read, and only what can be kept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.domain.progress import Recorded
from app.errors import BadRequest
from app.wire.telemetry import recorded


def event(**data: Any) -> dict[str, Any]:
    found = {"model_id": "s:train:0", "step": 3, "metrics": {"reward": 0.5}, **data}
    return {"event": "GENERIC_EVENT", "event_name": "metrics", "event_data": found}


def body(*events: Any) -> dict[str, Any]:
    return {"events": [*events], "session_id": "s", "platform": "Linux"}


def test_metrics_are_found_by_run_in_their_order() -> None:
    found = recorded(body(event(), event(model_id="s:train:1"), event(step=0, metrics={"a": 1, "b": 2.5})))
    assert found == {
        "s:train:0": [Recorded(3, {"reward": 0.5}), Recorded(0, {"a": 1.0, "b": 2.5})],
        "s:train:1": [Recorded(3, {"reward": 0.5})],
    }


@pytest.mark.parametrize(
    "other",
    [
        None,
        [],
        "text",
        {},
        {"events": {}},
        {"events": 5},
        body(),
        body(None, 3, []),
        body({"event": "SESSION_START"}),
        body({"event": "UNHANDLED_EXCEPTION", "event_name": "metrics", "traceback": "tml-key"}),
        body({**event(), "event_name": "user_error"}),
    ],
)
def test_all_other_telemetry_is_dropped(other: Any) -> None:
    assert recorded(other) == {}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a-1", "a-1"), ("x" * 512, "x" * 512), ("x" * 513, ""), ("a\n", ""), (5, ""), (None, "")],
)
def test_the_id_of_an_event_is_kept_if_it_is_a_short_printable_text(given: Any, kept: str) -> None:
    assert recorded(body({**event(), "event_id": given})) == {"s:train:0": [Recorded(3, {"reward": 0.5}, kept)]}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"model_id": None}, "model_id"),
        ({"model_id": "x" * 513}, "model_id"),
        ({"step": None}, "step"),
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"step": True}, "step"),
        ({"step": 2**31}, "step"),
        ({"metrics": None}, "1 to 16"),
        ({"metrics": {}}, "1 to 16"),
        ({"metrics": {f"m{number}": 1 for number in range(17)}}, "1 to 16"),
        ({"metrics": {"": 1}}, "name"),
        ({"metrics": {"a\n": 1}}, "name"),
        ({"metrics": {"a" * 65: 1}}, "name"),
        ({"metrics": {f"{number:064}": 1 for number in range(9)}}, "512"),
        ({"metrics": {"a": "1"}}, "number"),
        ({"metrics": {"a": True}}, "number"),
        ({"metrics": {"a": [1]}}, "number"),
    ],
)
def test_metrics_that_cannot_be_kept_are_refused_in_words(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        recorded(body(event(), event(**wrong)))


def test_an_event_without_data_is_refused() -> None:
    with pytest.raises(BadRequest, match="model_id"):
        recorded(body({**event(), "event_data": None}))


def test_more_events_than_the_sdk_sends_at_a_time_are_refused() -> None:
    assert len(recorded(body(*[event()] * 100))["s:train:0"]) == 100
    with pytest.raises(BadRequest, match="100"):
        recorded(body(*[event()] * 60, *[event(model_id="other")] * 41))


def test_values_that_are_not_finite_are_left_out_and_others_have_six_digits() -> None:
    values = {"nan": math.nan, "null": None, "inf": math.inf, "huge": 10**400, "third": 1 / 3, "big": 1.5e300}
    assert recorded(body(event(metrics=values))) == {"s:train:0": [Recorded(3, {"third": 0.333333, "big": 1.5e300})]}

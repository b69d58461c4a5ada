"""Every request to a route is answered, and never with a 5xx: `make fuzz` sends 20,000 requests, CI a few of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NotSet

from app import web
from tests.fuzz import spoilt
from tests.fuzz.test_odd_values import ODD, bodies
from tests.fuzz.world import World, examples

SCHEMA = schemathesis.openapi.from_dict(web.openapi())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
PROTOBUF, JSON = "application/x-protobuf", "application/json"
NOT_JSON = {"POST /api/v1/forward_backward"}
# A route with neither a body nor a name in its path is one request, however many it may send.
SHARE = 0.5 / sum(1 for label, operation in OPERATIONS.items() if operation.body or "{" in label)


@pytest.mark.parametrize("label", sorted(OPERATIONS.keys() - NOT_JSON))
def test_what_the_openapi_file_describes_is_never_a_5xx(fuzzed: World, label: str) -> None:
    @examples(SHARE)
    @given(case=_cases(label), real=st.booleans())
    def send(case: schemathesis.Case, real: bool) -> None:
        body, parts = case.body, case.path_parameters or {}
        if real:
            body, parts = fuzzed.fill_in(body), fuzzed.fill_in(parts)
        path = case.path
        for name, value in parts.items():
            path = path.replace(f"{{{name}}}", quote(str(value), safe="%"))
        data = None if isinstance(body, NotSet) else body if isinstance(body, bytes) else json.dumps(body)
        fuzzed.send(case.method, path, query_string=dict(case.query or {}), data=data, content_type=case.media_type)

    send()


SEEDS = st.integers(0, 2**32)
VALUES = st.recursive(
    st.sampled_from(ODD) | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def test_a_body_with_anything_anywhere_in_it_is_never_a_5xx(fuzzed: World) -> None:
    made: dict[str, dict[str, Any]] = {}

    @examples(0.3)
    @given(values=st.lists(VALUES, min_size=1, max_size=3), seed=SEEDS)
    def send(values: list[Any], seed: int) -> None:
        if fuzzed.sent % 100 == 0 or not made:
            made.clear()
            made.update(bodies(fuzzed.api))
        draw = random.Random(seed)
        path = draw.choice(list(made))
        body = copy.deepcopy(made[path])
        for value in values:
            if places := list(_places(body)):
                container, key = draw.choice(places)
                container[key] = copy.deepcopy(value)
        fuzzed.send("POST", f"/api/v1/{path}", data=json.dumps(body), content_type=JSON)

    send()


def test_a_protobuf_body_with_anything_in_it_is_never_a_5xx(fuzzed: World) -> None:
    @examples(0.3)
    @given(draw=st.randoms(use_true_random=False))
    def send(draw: random.Random) -> None:
        message = spoilt.request(fuzzed.known.get("model_id", ""), draw)
        body = spoilt.damaged(message.SerializeToString(), draw)
        headers = {}
        if draw.random() < 0.2:
            body, headers = spoilt.damaged(zstandard.compress(body), draw), {"Content-Encoding": "zstd"}
        fuzzed.send("POST", "/api/v1/forward_backward", data=body, content_type=PROTOBUF, headers=headers)

    send()


def test_half_of_what_fits_is_taken_so_that_the_rest_is_not_refused_at_the_door(fuzzed: World) -> None:
    """Fuzzing that never gets past the first check shows nothing: a valid call of each kind is accepted."""
    sent = {path: fuzzed.send("POST", f"/api/v1/{path}", json=body) for path, body in bodies(fuzzed.api).items()}
    refused = {path: answer.text for path, answer in sent.items() if answer.status_code not in (200, 408)}
    # They all have the same seq, which the first call uses up; and a finished session accepts no more calls.
    assert len(refused) < len(sent) / 2, refused


def _cases(label: str) -> st.SearchStrategy[schemathesis.Case]:
    """Calls that fit the schema and, where a body can be wrong, as many that do not."""
    operation = OPERATIONS[label]
    fitting = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not operation.body:
        return fitting
    return fitting | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)

"""Whatever is sent to a route is answered, and never by a 5xx: `make fuzz` sends 20,000 requests, CI a few of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import schemathesis
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NotSet
from tinker.proto import tinker_public_pb2 as sdk

from app import web
from app.domain.losses import LOSSES
from tests.fuzz.world import World, examples
from tests.unit.app.conftest import VOCAB, batch
from tests.unit.app.routes.test_odd_values import bodies

SCHEMA = schemathesis.openapi.from_dict(web.openapi())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
PROTOBUF, JSON = "application/x-protobuf", "application/json"
NOT_JSON = {"POST /api/v1/forward_backward"}
# Its own fuzzing is test_a_protobuf_body...; what has no body and no parameter needs one request.
SHARE = 0.5 / len(OPERATIONS)


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
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES | st.sampled_from([2**63, "x" * 9999]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def test_a_body_with_anything_anywhere_in_it_is_never_a_5xx(fuzzed: World) -> None:
    made: dict[str, dict[str, Any]] = {}

    @examples(0.25)
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
                container[key] = value
        fuzzed.send("POST", f"/api/v1/{path}", data=json.dumps(body), content_type=JSON)

    send()


def test_a_protobuf_body_with_anything_in_it_is_never_a_5xx(fuzzed: World) -> None:
    @examples(0.25)
    @given(message=_requests(), seed=SEEDS, damage=st.sampled_from(["", "", "flip", "cut", "insert"]))
    def send(message: sdk.ForwardBackwardRequest, seed: int, damage: str) -> None:
        draw = random.Random(seed)
        message.model_id = fuzzed.known.get("model_id", "")
        body = _damaged(message.SerializeToString(), damage, draw)
        headers = {}
        if draw.random() < 0.2:
            body, headers = zstandard.compress(body), {"Content-Encoding": "zstd"}
            body = _damaged(body, draw.choice(["", "cut", "flip"]), draw)
        fuzzed.send("POST", "/api/v1/forward_backward", data=body, content_type=PROTOBUF, headers=headers)

    send()


def test_half_of_what_fits_is_taken_so_that_the_rest_is_not_refused_at_the_door(fuzzed: World) -> None:
    """Fuzzing that never gets past the first check shows nothing: a valid call of each kind is taken."""
    sent = {path: fuzzed.send("POST", f"/api/v1/{path}", json=body) for path, body in bodies(fuzzed.api).items()}
    refused = {path: answer.text for path, answer in sent.items() if answer.status_code not in (200, 408)}
    # They all have the same seq, which the first takes; and a finished session takes nothing more.
    assert len(refused) < len(sent) / 2, refused


def _cases(label: str) -> st.SearchStrategy[schemathesis.Case]:
    """Calls that fit the schema, and where it has a body to be wrong in, as many that do not."""
    operation = OPERATIONS[label]
    fitting = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not operation.body:
        return fitting
    return fitting | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def _requests() -> st.SearchStrategy[sdk.ForwardBackwardRequest]:
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62]), max_size=3)
    tensors = st.tuples(st.sampled_from([0, 1, 2, 3, 4, 99]), sizes, st.binary(max_size=40), st.booleans())
    names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "mask", "", "\x00"])
    tokens = st.lists(st.integers(-1, VOCAB), max_size=4)
    data = st.lists(st.tuples(tokens, st.dictionaries(names, tensors)), max_size=3)
    losses = st.sampled_from([*LOSSES, "custom", ""])
    keys = st.sampled_from(["beta", "clip_low_threshold", "loss_id", "x"])
    config = st.dictionaries(keys, st.floats() | st.text(max_size=5))
    return st.builds(_request, data, losses, config, st.integers(-1, 2**31 - 1), st.booleans())


def _request(data: Any, loss: str, config: Any, seq: int, forward_only: bool) -> sdk.ForwardBackwardRequest:
    message = batch("", seq, loss_fn=loss)
    message.forward_only = forward_only
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        for name, (dtype, shape, raw, sparse) in inputs.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = dtype
            tensor.shape.extend(shape)
            if sparse:
                tensor.sparse_csr.values, tensor.sparse_csr.crow_indices = raw, raw[:16]
                tensor.sparse_csr.col_indices = raw[-16:]
            else:
                tensor.dense = raw
    for key, value in config.items():
        setattr(message.loss_fn_config_v2[key], "text" if isinstance(value, str) else "number", value)
    return message


def _damaged(body: bytes, damage: str, draw: random.Random) -> bytes:
    place = draw.randrange(len(body) + 1)
    rest = draw.randbytes(draw.randrange(1, 9))
    match damage:
        case "flip":
            return body[:place] + rest + body[place + len(rest) :]
        case "cut":
            return body[:place]
        case "insert":
            return body[:place] + rest + body[place:]
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)

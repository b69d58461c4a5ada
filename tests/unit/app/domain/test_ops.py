from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest

from app.domain import ops
from app.domain.images import Image
from app.domain.ops import (
    AdamParams,
    Batch,
    CreateModel,
    ForwardBackward,
    LoraSpec,
    ModelSpec,
    OptimStep,
    Ragged,
    SaveWeights,
)
from app.domain.sampling import Cells, SampleRequest
from app.errors import NewerContent


def batch() -> Batch:
    tokens = [np.array([1, 2, 3], dtype=np.int32), np.array([4], dtype=np.int32)]
    return Batch(
        Ragged.of(tokens, np.int32),
        {"weights": Ragged.of([np.ones((3, 2)), np.zeros((1, 2))], np.float32)},
    )


OPS = [
    CreateModel(ModelSpec("base", LoraSpec(8, seed=5)), "tinker://x", optimizer=True),
    OptimStep(AdamParams(eps=1e-12)),
    SaveWeights("weights", "name", 7200, True, {"b": "2", "a": "1"}),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.kind)
def test_an_op_comes_back_as_it_was(op):
    assert ops.decode(ops.encode(op)) == op


def test_arrays_come_back_with_their_dtype_shape_and_bits():
    op = ForwardBackward(batch(), "cross_entropy", {"x": 0.1}, True)
    back = ops.decode(ops.encode(op))
    assert (back.loss_fn, back.loss_config, back.forward_only, back.kind) == (
        "cross_entropy",
        {"x": 0.1},
        True,
        "forward",
    )
    for found, expected in (
        (back.batch.tokens, op.batch.tokens),
        *((back.batch.inputs[k], v) for k, v in op.batch.inputs.items()),
    ):
        assert found.shapes == expected.shapes
        assert found.values.dtype == expected.values.dtype
        assert found.values.tobytes() == expected.values.tobytes()


def test_routes_come_back_and_a_batch_without_them_has_the_bytes_of_before_they_were_known():
    routes = Ragged.of([np.arange(12).reshape(3, 2, 2), np.zeros((1, 2, 2))], np.uint8)
    plain = ForwardBackward(batch(), "cross_entropy")
    routed = replace(plain, batch=replace(plain.batch, routes=routes))
    back = ops.decode(ops.encode(routed))
    assert back.batch.routes.shapes == ((3, 2, 2), (1, 2, 2))
    assert back.batch.routes.values.dtype == np.uint8
    assert back.batch.routes.values.tobytes() == routes.values.tobytes()
    assert ops.encode(ops.as_asked(routed)) == ops.encode(plain), "the server looked the routes up"
    assert ops.decode(ops.encode(plain)).batch.routes is None


def test_equal_content_has_one_digest_whatever_the_order_of_its_names():
    one, two = ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0})
    digests = {ops.digest(ops.encode(ForwardBackward(batch(), "ppo", config))) for config in (one, two)}
    assert len(digests) == 1
    other = ops.digest(ops.encode(ForwardBackward(batch(), "ppo", {"a": 1.0, "b": 2.5})))
    assert other not in digests


def test_what_a_client_sends_cannot_become_another_type():
    request = SampleRequest(np.array([1]), 1, 1, 0, stop_strings=("LoraSpec",))
    assert ops.decode(ops.encode(request)).stop_strings == ("LoraSpec",)
    for strange in (msgpack.ExtType(9, b""), [msgpack.ExtType(2, b"Popen"), "ls"]):
        with pytest.raises(NewerContent):
            ops.decode(msgpack.packb(strange))


def test_a_sampling_request_comes_back_with_all_it_asks():
    cells = Cells(np.array([5, -1]), np.array([0, 2, 2]), 7, np.array([6, 1]))
    request = SampleRequest(
        np.array([1, 2, 3], np.int32), 4, 5, 6, 0.5, 0.9, 3, ("a",), (), True, True, 2, 8, cells, 9, 10
    )
    back = ops.decode(ops.encode(request))
    for name in SampleRequest.__slots__:
        if name not in ("prompt", "prompt_targets"):
            assert getattr(back, name) == getattr(request, name), name
    assert back.prompt.tolist() == [1, 2, 3]
    found = back.prompt_targets
    assert (found.values.tolist(), found.starts.tolist(), found.width, found.columns.tolist()) == (
        [5, -1],
        [0, 2, 2],
        7,
        [6, 1],
    )


def test_a_sampling_request_journalled_before_it_had_the_newer_fields_can_still_be_read():
    whole = msgpack.unpackb(ops.encode(SampleRequest(np.array([1], np.int32), 1, 2, 3)), ext_hook=msgpack.ExtType)
    back = ops.decode(msgpack.packb(whole[:12]))
    assert (back.max_tokens, back.prompt_logprobs, back.prompt_top, back.prompt_targets) == (2, False, 0, None)


def test_images_are_written_to_the_journal_in_one_form_for_ever():
    image = Image(0, 1, 2, "png", b"\x89PNG")
    batch = Batch(Ragged.of([np.array([5, 0, 0])], np.int32), {}, (image,))
    assert ops.encode(batch).hex() == (
        "94c70502426174636893c70602526167676564c7130192a33c69349103050000000000000000000000919103809196c70502496d616765"
        "000102a3706e67c40489504e47"
    )
    request = SampleRequest(np.array([5, 0, 0], np.int32), 1, 2, 3, images=(image,))
    assert ops.digest(ops.encode(request)) == "ba4dd4767f4aa0d374c66efaa8d3540edd92c4a2dd101f0d12aba05956c67d47"
    assert ops.decode(ops.encode(request)).images == (image,)


def test_only_journal_types_are_encoded():
    with pytest.raises(TypeError, match="type object cannot be written to the journal"):
        ops.encode(object())


@dataclass(frozen=True, slots=True)
class _Grown:
    """Two fields since version 1, and two that were added."""

    rank: int
    alpha: float = 1.0
    columns: Any = field(default_factory=lambda: np.zeros(2))
    names: tuple[str, ...] = ()


GROWN = ops.Codec({"Grown": (_Grown, 2)})


@dataclass(frozen=True, slots=True)
class _First:
    """The same in version 1."""

    rank: int
    alpha: float = 1.0


FIRST = ops.Codec({"Grown": (_First, 2)})


def test_added_fields_that_have_their_defaults_leave_the_bytes_and_so_the_digest_as_they_were():
    assert GROWN.encode(_Grown(3)) == FIRST.encode(_First(3))
    assert GROWN.encode(_Grown(3, 2.0, np.zeros(2))) == FIRST.encode(_First(3, 2.0))


def test_added_fields_are_written_up_to_the_last_one_that_was_set():
    for value in (_Grown(3, names=("a",)), _Grown(3, columns=np.ones(2)), _Grown(3, columns=None)):
        back = GROWN.decode(GROWN.encode(value))
        assert (back.rank, back.alpha, back.names) == (3, 1.0, value.names)
        assert np.array_equal(back.columns, value.columns)
    lengths = [
        len(msgpack.unpackb(GROWN.encode(v))) for v in (_Grown(3), _Grown(3, columns=None), _Grown(3, names=("a",)))
    ]
    assert lengths == [3, 4, 5], "the tag, and so many fields"


def test_what_was_written_before_a_field_was_added_is_read_with_its_default():
    back = GROWN.decode(FIRST.encode(_First(3, 2.0)))
    assert (back.rank, back.alpha, back.columns.tolist(), back.names) == (3, 2.0, [0.0, 0.0], ())


def test_a_tag_is_not_the_name_of_a_class():
    assert isinstance(FIRST.decode(GROWN.encode(_Grown(3))), _First)


NEWER = {
    "a tag": ops.Codec({"Unheard": (_Grown, 2)}).encode([_Grown(1)]),
    "more fields": GROWN.encode(_Grown(3, names=("a",))),
    "a version": msgpack.packb([msgpack.ExtType(3, b"2"), "in whatever form"]),
    "a kind of value": msgpack.packb({"x": msgpack.ExtType(4, b"")}),
}


@pytest.mark.parametrize("data", NEWER.values(), ids=NEWER.keys())
def test_what_only_a_newer_version_can_have_written_is_known_as_that(data: bytes):
    with pytest.raises(NewerContent):
        FIRST.decode(data)


def test_what_nobody_can_read_is_not_taken_for_newer():
    whole = ops.encode(ForwardBackward(batch(), "ppo"))
    for corrupt in (b"", whole[:-1], whole + b"x", b"\xc1", b"\xc7\x01\x01\x93"):
        assert not ops.is_newer(corrupt)
        with pytest.raises(Exception) as caught:
            ops.decode(corrupt)
        assert not isinstance(caught.value, NewerContent)


def test_every_field_that_was_added_has_a_default():
    for known, first in ops.TYPES.values():
        given = fields(known)
        assert len(given) >= first
        known(*[None] * first)

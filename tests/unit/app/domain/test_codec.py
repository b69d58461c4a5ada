from __future__ import annotations

import msgpack
import numpy as np
import pytest

from app.domain import codec
from app.domain.batch import Batch, Ragged
from app.domain.ops import AdamParams, CreateModel, ForwardBackward, LoraSpec, ModelSpec, OptimStep, SaveWeights
from app.domain.sampling import Cells, SampleRequest


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
    assert codec.decode(codec.encode(op)) == op


def test_arrays_come_back_with_their_dtype_shape_and_bits():
    op = ForwardBackward(batch(), "cross_entropy", {"x": 0.1}, True)
    back = codec.decode(codec.encode(op))
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


def test_equal_content_has_one_digest_whatever_the_order_of_its_names():
    one, two = ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0})
    digests = {codec.digest(codec.encode(ForwardBackward(batch(), "ppo", config))) for config in (one, two)}
    assert len(digests) == 1
    other = codec.digest(codec.encode(ForwardBackward(batch(), "ppo", {"a": 1.0, "b": 2.5})))
    assert other not in digests


def test_what_a_client_sends_cannot_become_another_type():
    request = SampleRequest(np.array([1]), 1, 1, 0, stop_strings=("LoraSpec",))
    assert codec.decode(codec.encode(request)).stop_strings == ("LoraSpec",)
    for strange in (msgpack.ExtType(9, b""), [msgpack.ExtType(2, b"Popen"), "ls"]):
        with pytest.raises((ValueError, KeyError)):
            codec.decode(msgpack.packb(strange))


def test_a_sampling_request_comes_back_with_all_it_asks():
    cells = Cells(np.array([5, -1]), np.array([0, 2, 2]), 7, np.array([6, 1]))
    request = SampleRequest(
        np.array([1, 2, 3], np.int32), 4, 5, 6, 0.5, 0.9, 3, ("a",), (), True, True, 2, 8, cells, 9, 10
    )
    back = codec.decode(codec.encode(request))
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
    whole = msgpack.unpackb(codec.encode(SampleRequest(np.array([1], np.int32), 1, 2, 3)), ext_hook=msgpack.ExtType)
    back = codec.decode(msgpack.packb(whole[:12]))
    assert (back.max_tokens, back.prompt_logprobs, back.prompt_top, back.prompt_targets) == (2, False, 0, None)


def test_only_journal_types_are_encoded():
    with pytest.raises(TypeError, match="object has no place"):
        codec.encode(object())

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from app.domain import codec
from app.domain.batch import Batch, Ragged
from app.domain.ops import AdamParams, CreateModel, ForwardBackward, LoraSpec, ModelSpec, OptimStep, SaveWeights
from app.domain.sampling import SampleRequest


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


def test_only_journal_types_are_encoded():
    with pytest.raises(TypeError, match="object has no place"):
        codec.encode(object())

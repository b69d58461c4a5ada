"""Bodies written by the real SDK decode to the arrays that the user put in."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from app.domain import ops
from app.domain.ops import ForwardBackward
from app.errors import BadRequest
from app.wire import json_bodies
from app.wire import tinker_pb2 as pb
from app.wire.forward_backward import no_losses, open_envelope
from app.wire.tensors import to_array

MINIMAL = bytes.fromhex(
    "0a09733a747261696e3a3010011a380a0c0a0a0a08010000000200000012280a0d7461726765745f746f6b656e73"
    "12170a10020000000000000003000000000000001802220102220d63726f73735f656e74726f7079"
)


def sdk_body(data: list[types.Datum], loss_fn: str = "cross_entropy", config: dict[str, float] | None = None) -> bytes:
    request = ForwardBackwardRequest(ForwardBackwardInput(data, loss_fn, config), "s:train:0", 7)
    return forward_backward_request_to_proto(request).SerializeToString()


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def decode(body: bytes) -> ForwardBackward:
    return open_envelope(body).decode(no_losses)


def test_the_documented_bytes_decode_to_their_content() -> None:
    envelope, op = open_envelope(MINIMAL), decode(MINIMAL)
    assert (envelope.model_id, envelope.seq, op.loss_fn, op.forward_only) == ("s:train:0", 1, "cross_entropy", False)
    assert [a.tolist() for a in op.batch.tokens] == [[1, 2]]
    assert [a.tolist() for a in op.batch.inputs["target_tokens"]] == [[2, 3]]


def test_columns_keep_every_datum_with_the_promised_dtypes() -> None:
    data = [
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.5, 1.0, -2.0]),
        datum([9], target_tokens=[8], weights=[1.0]),
    ]
    batch = decode(sdk_body(data)).batch
    assert [a.tolist() for a in batch.tokens] == [[1, 2, 3], [9]]
    assert [a.tolist() for a in batch.inputs["weights"]] == [[0.5, 1.0, -2.0], [1.0]]
    dtypes = (
        batch.tokens.values.dtype,
        batch.inputs["target_tokens"].values.dtype,
        batch.inputs["weights"].values.dtype,
    )
    assert dtypes == (np.int32, np.int64, np.float32)


def test_text_chunks_of_one_datum_are_joined() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    body = sdk_body(
        [types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [2, 3, 4]})]
    )
    assert [a.tolist() for a in decode(body).batch.tokens] == [[1, 2, 3]]


def test_sparse_targets_and_weights_of_different_sparsity_pair_up_again() -> None:
    targets = torch.zeros(20, 40, dtype=torch.int64)
    weights = torch.zeros(20, 40)
    targets[3, 5], targets[4, 0], weights[4, 0], weights[19, 39] = 7, 9, 0.25, -1.5
    body = sdk_body([datum(list(range(20)), target_tokens=targets, weights=weights)])
    assert b"target_tokens" in body and len(body) < targets.numel() * 4, "the SDK was expected to send CSR"
    inputs = decode(body).batch.inputs
    assert np.array_equal(next(iter(inputs["target_tokens"])), targets.numpy())
    assert np.array_equal(next(iter(inputs["weights"])), weights.numpy())


def test_a_datum_without_weights_has_ones_of_its_targets_shape() -> None:
    """SkyRL's tests send such a batch, and the SDK cuts large ones anywhere."""
    sparse = torch.zeros(20, 40, dtype=torch.int64)
    data = [
        datum([1, 2], target_tokens=[2, 3], weights=[0.0, 0.5]),
        datum([9, 1, 2], target_tokens=[8, 2, 3]),
        datum(list(range(20)), target_tokens=sparse),
    ]
    weights = decode(sdk_body(data)).batch.inputs["weights"]
    assert weights.values.dtype == np.float32
    assert [a.tolist() for a in weights] == [[0.0, 0.5], [1.0] * 3, [[1.0] * 40] * 20]


def test_any_other_input_that_only_some_datums_have_is_refused() -> None:
    data = [datum([1, 2], target_tokens=[2, 3], weights=[0.0, 0.5]), datum([9], weights=[1.0])]
    with pytest.raises(BadRequest, match="datum 1: target_tokens is missing"):
        decode(sdk_body(data))
    untargeted = [datum([1], weights=[1.0]), datum([2])]
    with pytest.raises(BadRequest, match="datum 1: weights is missing"):
        decode(sdk_body(untargeted))
    value = types.TensorData(data=[0.0], dtype="float32", shape=[1])
    critic = [datum([1], values=value, returns=value, weights=[1.0]), datum([1], values=value, returns=value)]
    with pytest.raises(BadRequest, match="datum 1: weights is missing"):
        decode(sdk_body(critic, "ppo_critic"))


def test_bfloat16_is_widened_exactly() -> None:
    values = torch.tensor([1.0, -2.5, 3.140625], dtype=torch.bfloat16)
    tensor = pb.Tensor(dense=values.view(torch.int16).numpy().tobytes(), dtype=pb.DTYPE_BFLOAT16, shape=[3])
    assert np.array_equal(to_array(tensor, "x"), values.float().numpy())


def test_a_tensor_without_shape_is_one_dimensional() -> None:
    tensor = pb.Tensor(dense=np.arange(3, dtype="<i8").tobytes(), dtype=pb.DTYPE_INT64)
    assert to_array(tensor, "x").tolist() == [0, 1, 2]


def test_inputs_the_loss_does_not_read_are_ignored() -> None:
    extra = datum([1, 2], target_tokens=[2, 3], mask=types.TensorData(data=[1.0], dtype="float32", shape=[1]))
    assert set(decode(sdk_body([extra])).batch.inputs) == {"target_tokens"}


def test_loss_settings_are_read_from_either_map() -> None:
    request = pb.ForwardBackwardRequest.FromString(sdk_body([], "ppo", {"clip_low_threshold": 0.7}))
    assert decode(request.SerializeToString()).loss_config == {"clip_low_threshold": 0.7}
    request.ClearField("loss_fn_config_v2")
    assert decode(request.SerializeToString()).loss_config == {"clip_low_threshold": 0.7}


def test_a_json_body_is_the_same_op_to_the_digest() -> None:
    tensor = {"data": [2, 3], "dtype": "int64", "shape": [2]}
    item = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": {"data": [1, 0.5], "dtype": "float32", "shape": [2]}},
    }
    content = {"data": [item], "loss_fn": "cross_entropy"}
    body = json.dumps({"model_id": "s:train:0", "seq_id": 7, "forward_backward_input": content}).encode()
    envelope = json_bodies.open_envelope(json.loads(body))
    ours = envelope.decode(no_losses)
    theirs = decode(sdk_body([datum([1, 2], target_tokens=[2, 3], weights=[1.0, 0.5])]))
    assert (envelope.model_id, envelope.seq) == ("s:train:0", 7)
    assert ops.digest(ops.encode(ours)) == ops.digest(ops.encode(theirs))


def test_an_empty_list_of_integers_in_json_is_one_of_integers() -> None:
    tensor = {"data": [], "dtype": "int64", "shape": [0, 2]}
    item = {"model_input": {"chunks": []}, "loss_fn_inputs": {"target_tokens": tensor}}
    content = {"data": [item], "loss_fn": "cross_entropy"}
    envelope = json_bodies.open_envelope({"model_id": "s:train:0", "seq_id": 7, "forward_backward_input": content})
    targets = envelope.decode(no_losses).batch.inputs["target_tokens"]
    assert (targets.values.dtype, targets.shapes) == (np.int64, ((0, 2),))


def csr(values: list[int], starts: list[int], columns: list[int], shape: list[int]) -> pb.Tensor:
    raw = [np.array(part, "<i8").tobytes() for part in (values, starts, columns)]
    sparse = pb.SparseCsr(values=raw[0], crow_indices=raw[1], col_indices=raw[2])
    return pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_INT64, shape=shape)


MALFORMED = {
    "no dtype": (pb.Tensor(dense=b"1234", shape=[1]), "dtype"),
    "half a number": (pb.Tensor(dense=b"123", dtype=pb.DTYPE_FLOAT32, shape=[1]), "3 bytes"),
    "shape too large": (pb.Tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32, shape=[2]), r"\[2\]"),
    "negative shape": (pb.Tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32, shape=[-1, -1]), "-1"),
    "more sizes than numpy takes": (pb.Tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32, shape=[1] * 65), "65 dimensions"),
    "sizes without end": (
        pb.Tensor(dense=b"1234", dtype=pb.DTYPE_FLOAT32, shape=[2**31] * 10**6),
        "1000000 dimensions",
    ),
    "larger than numpy takes": (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0, 2**62]), r"\[0, 4611686018427387904\]"),
    "one-dimensional csr": (csr([1], [0, 1], [0], [1]), "two dimensions"),
    "column outside": (csr([1], [0, 1], [5], [1, 5]), "0..4"),
    "negative column": (csr([1], [0, 1], [-1], [1, 5]), "0..4"),
    "rows missing": (csr([1], [0, 1], [0], [2, 5]), "must be 3 numbers"),
    "falling rows": (csr([1, 2], [0, 2, 1, 2], [0, 1], [3, 5]), "rise"),
    "rows that fall by more than int64 holds": (csr([], [0, 2**63 - 1, -(2**63), -1, 0], [], [4, 1]), "rise"),
    "values missing": (csr([1], [0, 2], [0, 1], [1, 5]), "rise"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_tensor_is_refused_by_name(case: str) -> None:
    tensor, why = MALFORMED[case]
    with pytest.raises(BadRequest, match=f"datum 3: weights.*{why}"):
        to_array(tensor, "datum 3: weights")


def test_a_few_bytes_of_csr_cannot_unfold_to_gigabytes() -> None:
    request = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(10):
        added = request.data.add()
        added.loss_fn_inputs["target_tokens"].CopyFrom(csr([], [0, 0], [], [1, 2**24]))
    with pytest.raises(BadRequest, match="sparse tensors of the call have 167772160 elements"):
        decode(request.SerializeToString())
    request.data[0].loss_fn_inputs["target_tokens"].shape.extend([2**31] * 10**6)
    with pytest.raises(BadRequest, match="target_tokens: the shape has 1000002 dimensions"):
        decode(request.SerializeToString())


def test_the_columns_of_a_call_share_the_limit_of_sparse_tensors() -> None:
    request = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    inputs = request.data.add().loss_fn_inputs
    inputs["target_tokens"].CopyFrom(csr([], [0, 0], [], [1, 2**22]))
    inputs["weights"].CopyFrom(csr([], [0, 0], [], [1, 2**22]))
    assert decode(request.SerializeToString()).batch.inputs["weights"].shapes == ((1, 2**22),)
    inputs["weights"].shape[1] += 1
    with pytest.raises(BadRequest, match="have 8388609 elements"):
        decode(request.SerializeToString())


def test_a_body_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadRequest, match="not a Forward"):
        open_envelope(b"\xff\xff")

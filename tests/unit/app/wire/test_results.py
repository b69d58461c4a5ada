"""Results as the real SDK reads them."""

from __future__ import annotations

import numpy as np
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from app.domain.batch import Ragged
from app.domain.results import CriticOutput, ForwardBackwardOutput
from app.domain.sampling import SampledSequence, SampleOutput
from app.wire import tinker_pb2 as pb
from app.wire.results import encode_forward_backward, encode_sample


def test_the_documented_forward_backward_bytes_are_ours() -> None:
    logprobs = Ragged.of([np.array([-1.5, -1.5])], np.float32)
    body = encode_forward_backward(ForwardBackwardOutput(logprobs, {"loss:sum": 3.0}))
    assert body.hex() == (
        "0a0b41727261795265636f7264122e122a0a086c6f6770726f6273121e0a080000c0bf0000c0bf1210000000000000000008"
        "00000000000000180118011a130a086c6f73733a73756d110000000000000840"
    )


def test_ragged_shapes_come_back_in_order() -> None:
    arrays = [
        np.arange(n, dtype=np.float32).reshape(shape)
        for n, shape in ((3, (3,)), (1, (1,)), (6, (3, 2)), (4, (2, 2)), (6, (2, 3)), (2, (2,)))
    ]
    output = ForwardBackwardOutput(Ragged.of(arrays, np.float32), {"loss:sum": 1.0, "a:mean": 2.0})
    read = deserialize_forward_backward_output(encode_forward_backward(output))
    assert read.metrics == {"loss:sum": 1.0, "a:mean": 2.0}
    got = [datum["logprobs"].to_numpy() for datum in read.loss_fn_outputs]
    assert [a.tolist() for a in got] == [a.tolist() for a in arrays]
    assert all(a.dtype == np.float32 for a in got)


def test_a_critics_values_come_back_as_values() -> None:
    arrays = [np.array([0.5, -1.0, 2.0]), np.array([3.0])]
    output = CriticOutput(Ragged.of(arrays, np.float32), {"loss:sum": 1.0})
    read = deserialize_forward_backward_output(encode_forward_backward(output))
    assert [list(datum) for datum in read.loss_fn_outputs] == [["values"], ["values"]]
    assert [datum["values"].to_numpy().tolist() for datum in read.loss_fn_outputs] == [a.tolist() for a in arrays]


def test_datums_of_one_width_share_a_record() -> None:
    logprobs = Ragged.of([np.zeros(3), np.zeros(5), np.zeros((2, 4))], np.float32)
    message = pb.ForwardBackwardOutput.FromString(encode_forward_backward(ForwardBackwardOutput(logprobs, {})))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1]


def sequence(tokens: list[int], logprobs: list[float], stopped: bool) -> SampledSequence:
    return SampledSequence(np.array(tokens, np.int32), np.array(logprobs, np.float32), stopped)


def test_the_documented_sample_bytes_are_ours() -> None:
    body = encode_sample(SampleOutput((sequence([10, 11], [-0.5, -0.5], False),)))
    assert body.hex() == "0a16080112080a0000000b0000001a08000000bf000000bf"


def test_samples_and_prompt_logprobs_come_back() -> None:
    prompt = np.array([np.nan, -1.0, -2.0], np.float32)
    output = SampleOutput((sequence([5, 6], [-0.25, -1.0], True), sequence([7], [-3.0], False)), prompt)
    read = deserialize_sample_response(encode_sample(output))
    assert [s.stop_reason for s in read.sequences] == ["stop", "length"]
    assert [list(s.tokens) for s in read.sequences] == [[5, 6], [7]]
    assert [list(s.logprobs) for s in read.sequences] == [[-0.25, -1.0], [-3.0]]
    assert list(read.prompt_logprobs) == [None, -1.0, -2.0]

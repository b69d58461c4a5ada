"""Results as SDKs up to 0.17 read them: plain JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from app.domain.ops import Ragged
from app.domain.results import CriticOutput, ForwardBackwardOutput
from app.domain.sampling import UNSCORED, SampledSequence, SampleOutput, TokenLogprobs
from app.wire.results import encode_forward_backward, encode_sample, translate


def forward_backward(output: ForwardBackwardOutput | CriticOutput) -> dict[str, Any]:
    return json.loads(translate("forward_backward", encode_forward_backward(output)))


def sample(output: SampleOutput) -> dict[str, Any]:
    return json.loads(translate("sample", encode_sample(output)))


def test_every_datum_has_its_logprobs_bit_for_bit_in_order_and_shape() -> None:
    arrays = [
        np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((3,), (1,), (3, 2), (2, 2), (2,))
    ]
    read = forward_backward(ForwardBackwardOutput(Ragged.of(arrays, np.float32), {"loss:sum": 1.5, "a:mean": 2.0}))
    assert (read["loss_fn_output_type"], read["metrics"]) == ("ArrayRecord", {"loss:sum": 1.5, "a:mean": 2.0})
    tensors = [datum["logprobs"] for datum in read["loss_fn_outputs"]]
    assert [(t["dtype"], tuple(t["shape"])) for t in tensors] == [("float32", a.shape) for a in arrays]
    found = [np.array(tensor["data"], np.float32).tobytes() for tensor in tensors]
    assert found == [array.tobytes() for array in arrays]


def test_a_datum_without_targets_has_no_values() -> None:
    """top_logprobs targets may have a shape of [N, 0]."""
    arrays = [np.zeros((2, 0), np.float32), np.zeros((0, 0), np.float32)]
    read = forward_backward(ForwardBackwardOutput(Ragged.of(arrays, np.float32), {}))
    empty = {"logprobs": {"data": [], "dtype": "float32", "shape": [0, 0]}}
    assert read["loss_fn_outputs"] == [empty, empty]


def test_a_metric_that_is_not_finite_is_left_out_because_json_has_no_such_number() -> None:
    metrics = {"ratio:max": 0.0, "ratio:min": float("inf"), "kl:sum": float("nan")}
    read = forward_backward(ForwardBackwardOutput(Ragged.of([np.zeros(1)], np.float32), metrics))
    assert read["metrics"] == {"ratio:max": 0.0}


def test_a_critics_values_come_as_values() -> None:
    read = forward_backward(CriticOutput(Ragged.of([np.array([0.5, -1.0])], np.float32), {"loss:sum": 1.0}))
    assert read["loss_fn_outputs"] == [{"values": {"data": [0.5, -1.0], "dtype": "float32", "shape": [2]}}]


def sequence(tokens: list[int], logprobs: list[float], stopped: bool) -> SampledSequence:
    return SampledSequence(np.array(tokens, np.int32), np.array(logprobs, np.float32), stopped)


def test_samples_say_why_they_ended_and_the_prompt_has_null_where_it_was_not_scored() -> None:
    prompt = np.array([np.nan, -1.0], np.float32)
    top = TokenLogprobs(
        np.array([[0, 0], [7, 0], [3, 2]], np.int32),
        np.array([[UNSCORED, UNSCORED], [-0.5, UNSCORED], [-0.25, -3.0]], np.float32),
    )
    sequences = (sequence([5, 6], [-0.25, -1.0], True), sequence([7], [-3.0], False))
    assert sample(SampleOutput(sequences, prompt, top)) == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [5, 6], "logprobs": [-0.25, -1.0]},
            {"stop_reason": "length", "tokens": [7], "logprobs": [-3.0]},
        ],
        "prompt_logprobs": [None, -1.0],
        "topk_prompt_logprobs": [None, [[7, -0.5]], [[3, -0.25], [2, -3.0]]],
    }


def test_what_was_not_asked_of_a_prompt_is_absent() -> None:
    assert set(sample(SampleOutput((sequence([1], [-1.0], True),)))) == {"type", "sequences"}

"""Results as the real SDK reads them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tinker
from pydantic import BaseModel
from tinker import types
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from app.domain.ops import AdamParams, CreateModel, LoadWeights, ModelSpec, Op, OptimStep, Ragged, SaveWeights
from app.domain.results import CriticOutput, Done, ForwardBackwardOutput, OptimStepOutput, Output
from app.domain.sampling import UNSCORED, Cells, SampledSequence, SampleOutput, TokenLogprobs
from app.wire import tinker_pb2 as pb
from app.wire.results import encode_forward_backward, encode_sample, of_call, of_output


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


def test_a_cross_entropy_comes_back_beside_the_logprobs_of_its_datum() -> None:
    scores = [np.array([-1.0, -2.0]), np.array([[-0.5, -4.0]]), np.array([-3.0])]
    losses = [np.array([0.0, 1.0]), np.array([[0.5, 8.0]]), np.array([3.0])]
    found = [Ragged.of(arrays, np.float32) for arrays in (scores, losses)]
    output = ForwardBackwardOutput(found[0], {"loss:sum": 12.5}, elementwise_loss=found[1])
    read = deserialize_forward_backward_output(encode_forward_backward(output)).loss_fn_outputs
    assert [datum["logprobs"].to_numpy().tolist() for datum in read] == [a.tolist() for a in scores]
    assert [datum["elementwise_loss"].to_numpy().tolist() for datum in read] == [a.tolist() for a in losses]


def test_the_norm_of_a_gradient_has_the_hosted_services_name_too() -> None:
    result = of_output(OptimStep(AdamParams()), OptimStepOutput({"grad_norm": 2.5, "learning_rate": 0.1}))
    response = tinker.OptimStepResponse.model_validate_json(result.body)
    assert response.metrics == {"grad_norm": 2.5, "learning_rate": 0.1, "unclipped_grad_l2:mean": 2.5}


SPEC = ModelSpec("base", None)
PATH = "tinker://session:train:0/weights/a"
CALLS: dict[str, tuple[Op, dict[str, str], type[BaseModel]]] = {
    "create_model": (CreateModel(SPEC), {"model_id": "m"}, types.CreateModelResponse),
    "load_weights": (CreateModel(SPEC, PATH), {"model_id": "m"}, types.LoadWeightsResponse),
    "save_weights": (SaveWeights("weights", "a"), {"path": PATH}, types.SaveWeightsResponse),
    "save_weights_for_sampler": (
        SaveWeights("sampler_weights", "a"),
        {"path": PATH},
        types.SaveWeightsForSamplerResponseInternal,
    ),
    "save_weights_external": (
        SaveWeights("external_weights", "a"),
        {"path": PATH},
        types.SaveWeightsExternalResponseInternal,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_result_has_the_type_of_the_sdks_response(call: str) -> None:
    op, body, response = CALLS[call]
    found = response.model_validate_json(of_call(op, body).body)
    assert found.model_dump(exclude_none=True) == {"type": call, **body}


@pytest.mark.parametrize(
    ("op", "output", "expected"),
    [
        (OptimStep(AdamParams()), OptimStepOutput(), {"type": "optim_step", "metrics": {}}),
        (LoadWeights(PATH, optimizer=True), Done(), {"type": "load_weights"}),
    ],
)
def test_an_output_has_the_type_of_its_call(op: Op, output: Output, expected: dict[str, Any]) -> None:
    """North-Shore-AI/tinkex waits for a `type`."""
    assert json.loads(of_output(op, output).body) == expected


def test_no_json_result_has_a_number_that_is_not_finite() -> None:
    """The SDK reads it as no JSON."""
    with pytest.raises(ValueError, match="JSON"):
        of_output(OptimStep(AdamParams()), OptimStepOutput({"param_norm": float("inf")}))


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


def tokens(ids: list[list[int]], logprobs: list[list[float]]) -> TokenLogprobs:
    return TokenLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))


def test_the_likeliest_tokens_come_back_with_none_where_nothing_was_scored() -> None:
    top = tokens([[0, 0], [7, 0], [3, 2]], [[UNSCORED, UNSCORED], [-0.5, -1.5], [-0.25, -3.0]])
    sampled = SampledSequence(np.array([5], np.int32), np.array([-1.0], np.float32), True, tokens([[5]], [[-1.0]]))
    read = deserialize_sample_response(encode_sample(SampleOutput((sampled,), prompt_top=top)))
    assert read.topk_prompt_logprobs == [None, [(7, -0.5), (0, -1.5)], [(3, -0.25), (2, -3.0)]]
    assert read.sequences[0].topk_logprobs == [[(5, -1.0)]]


def test_target_logprobs_keep_the_layout_they_were_asked_in() -> None:
    values = np.array([-1.0, 0.0, -2.0, -3.0], np.float32)
    dense = Cells(values, np.array([0, 2, 4]), 2)
    sparse = Cells(values, np.array([0, 1, 1, 4]), 9, np.array([8, 0, 3, 4]))
    read = deserialize_sample_response(encode_sample(SampleOutput((), prompt_targets=dense))).target_prompt_logprobs
    assert (read.dtype, read.to_numpy().tolist()) == ("float32", [[-1.0, 0.0], [-2.0, -3.0]])
    read = deserialize_sample_response(encode_sample(SampleOutput((), prompt_targets=sparse))).target_prompt_logprobs
    assert (read.shape, read.sparse_crow_indices, read.sparse_col_indices) == ([3, 9], [0, 1, 1, 4], [8, 0, 3, 4])
    assert read.data == values.tolist()


def test_alternatives_and_cached_tokens_come_back() -> None:
    output = SampleOutput((), prompt_alternatives=tokens([[4, 5], [6, 7]], [[-1, -2], [-3, -4]]), cached_tokens=96)
    read = deserialize_sample_response(encode_sample(output))
    assert read.prompt_alt_tokens.tokens.to_numpy().tolist() == [[4, 5], [6, 7]]
    assert read.prompt_alt_tokens.logprobs.to_numpy().tolist() == [[-1, -2], [-3, -4]]
    assert read.prompt_cache_hit_tokens == 96


def test_a_prompt_of_one_token_has_no_rows_but_has_the_fields_that_were_asked_for() -> None:
    empty = np.empty(0, np.float32)
    output = SampleOutput(
        (),
        np.array([np.nan], np.float32),
        tokens([[0]], [[UNSCORED]]),
        Cells(empty, np.array([0]), 3),
        TokenLogprobs(np.empty((0, 2), np.int32), empty.reshape(0, 2)),
    )
    read = deserialize_sample_response(encode_sample(output))
    assert (read.prompt_logprobs, read.topk_prompt_logprobs) == ([None], [None])
    assert (read.target_prompt_logprobs.shape, read.prompt_alt_tokens.tokens.shape) == ([0, 3], [0, 2])


def test_what_was_not_asked_for_is_absent() -> None:
    read = deserialize_sample_response(encode_sample(SampleOutput((sequence([1], [-1.0], True),))))
    assert (read.prompt_logprobs, read.topk_prompt_logprobs) == (None, None)
    assert (read.target_prompt_logprobs, read.prompt_alt_tokens) == (None, None)
    assert (read.sequences[0].topk_logprobs, read.prompt_cache_hit_tokens) == (None, 0)

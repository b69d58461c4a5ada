from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk

from app import create_app
from app.api.base import EXTENSION
from app.domain import ops
from app.domain.losses import CUSTOM, LOSSES
from app.domain.records import Worker
from app.settings import Settings
from tests.unit.app.conftest import CONTEXT, VOCAB, Api, batch, set_tensor

POLICY = {"target_tokens": [2, 3, 4], "logprobs": [-1.0, -1.0, -1.0], "advantages": [1.0, 1.0, 1.0]}
SEQUENCE = {**POLICY, "sequence_ratio_mask": [0.0, 1.0, 1.0]}
STEP = {"adam_params": {"learning_rate": 1e-3, "eps": 1e-8}, "type": "optim_step"}


def op_of(api: Api, model: str, seq: int) -> ops.Op:
    entry = api.services.oplog.entry(model, seq)
    assert entry is not None
    return ops.decode(entry.payload)


def test_a_batch_is_journalled_as_sent_with_its_settings_in_full(api: Api) -> None:
    model = api.model()
    answer = api.forward_backward(batch(model, 1, loss_fn="ppo", config={"clip_low_threshold": 0.5}, **POLICY))
    assert answer.json["request_id"] == f"{model}:1"
    op = op_of(api, model, 1)
    assert op.loss_config == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2, "entropy": 0.0}
    assert op.batch.inputs["advantages"].values.tolist() == [1.0, 1.0, 1.0]


def test_a_retried_call_returns_the_original_future(api: Api) -> None:
    model = api.model()
    first, again = (api.forward_backward(batch(model, 1)) for _ in range(2))
    assert (first.status_code, first.json) == (again.status_code, again.json) == (200, first.json)
    step = {"model_id": model, "seq_id": 2, **STEP}
    assert api.post("optim_step", step).json == api.post("optim_step", step).json


def test_a_seq_used_for_something_else_is_a_400_and_changes_nothing(api: Api) -> None:
    model = api.model()
    api.forward_backward(batch(model, 1))
    other = api.forward_backward(batch(model, 1, tokens=[3, 2, 1]))
    assert (other.status_code, "other content" in other.json["detail"]) == (400, True)
    assert op_of(api, model, 1).batch.tokens.values.tolist() == [1, 2, 3]
    assert api.services.oplog.entry(model, 1).kind == "forward_backward"


def test_later_seqs_are_acknowledged_before_earlier_ones(api: Api) -> None:
    model = api.model()
    assert [api.forward_backward(batch(model, seq)).status_code for seq in (3, 2, 1)] == [200] * 3


def test_an_optim_step_takes_every_parameter(api: Api) -> None:
    model = api.model()
    params = {"learning_rate": 0.1, "beta1": 0.5, "beta2": 0.6, "eps": 1e-7, "weight_decay": 0.2, "grad_clip_norm": 3.0}
    api.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": params})
    assert op_of(api, model, 1) == ops.OptimStep(ops.AdamParams(**params))


def test_wide_targets_are_for_cross_entropy_only(api: Api) -> None:
    model = api.model()
    wide = {"target_tokens": np.full((3, 2), 5), "weights": np.full((3, 2), 0.5)}
    assert api.forward_backward(batch(model, 1, **wide)).status_code == 200
    assert op_of(api, model, 1).batch.inputs["weights"].shapes == ((3, 2),)
    refused = api.forward_backward(batch(model, 2, loss_fn="ppo", **{**POLICY, "target_tokens": np.full((3, 2), 5)}))
    assert (refused.status_code, "[3, 2]" in refused.json["detail"]) == (400, True)


def test_negative_and_zero_weights_are_fine(api: Api) -> None:
    assert (
        api.forward_backward(batch(api.model(), 1, target_tokens=[2, 3, 4], weights=[-1.5, 0.0, 2.0])).status_code
        == 200
    )


CROSS = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
BAD_BATCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "token too large": ({"tokens": [1, 2, VOCAB]}, ["datum 0", "position 2", str(VOCAB), str(VOCAB - 1)]),
    "token negative": ({"tokens": [1, -7, 2]}, ["datum 0", "position 1", "-7"]),
    "target too large": ({**CROSS, "target_tokens": [2, 3, 5000]}, ["target_tokens", "position 2", "5000"]),
    "no tokens": ({"tokens": [], "target_tokens": []}, ["datum 0", "0 tokens"]),
    "too long": (
        {"tokens": [1] * (CONTEXT + 1), "target_tokens": [1] * (CONTEXT + 1)},
        [str(CONTEXT + 1), str(CONTEXT), "max_length"],
    ),
    "unknown loss": ({"loss_fn": "hinge"}, ["'hinge'", "cross_entropy", "dro"]),
    "a proprietary loss": ({"loss_fn": "stable_reinforce", **POLICY}, ["stable_reinforce", "proprietary", "cispo"]),
    "custom": ({"loss_fn": "custom"}, ["custom"]),
    "input missing": ({"loss_fn": "ppo", "target_tokens": [2, 3, 4], "logprobs": [0.0] * 3}, ["ppo", "advantages"]),
    "targets missing": ({"weights": [1.0] * 3}, ["target_tokens"]),
    "targets short": ({"target_tokens": [2, 3]}, ["datum 0", "target_tokens", "[2]", "[3]"]),
    "weights short": ({**CROSS, "weights": [1.0]}, ["datum 0", "weights", "[1]", "[3]"]),
    "weights wide": ({**CROSS, "weights": np.ones((3, 2))}, ["weights", "[3, 2]"]),
    "three dimensions": ({"target_tokens": np.ones((3, 1, 1))}, ["[3, 1, 1]"]),
    "more targets than tokens": ({"target_tokens": np.ones((3, VOCAB + 1))}, ["datum 0", str(VOCAB + 1), str(VOCAB)]),
    "nan weight": ({**CROSS, "weights": [1.0, math.nan, 1.0]}, ["datum 0", "weights", "position 1", "nan"]),
    "infinite advantage": ({"loss_fn": "dro", **POLICY, "advantages": [math.inf, 0, 0]}, ["advantages", "inf"]),
    "unknown setting": ({"config": {"beta": 1.0}}, ["'beta'", "cross_entropy"]),
    "negative setting": ({"loss_fn": "dro", **POLICY, "config": {"beta": -1.0}}, ["beta", "-1.0"]),
    "nan setting": ({"loss_fn": "dro", **POLICY, "config": {"beta": math.nan}}, ["beta", "nan"]),
    "huge setting": (
        {"loss_fn": "ppo", **POLICY, "config": {"clip_high_threshold": 1e39}},
        ["high_threshold", "1e+39"],
    ),
    "clip bounds": ({"loss_fn": "ppo", **POLICY, "config": {"clip_low_threshold": 2.5}}, ["2.5", "1.2"]),
    "a token's clip bounds": (
        {"loss_fn": "cispo", **POLICY, "clip_low_threshold": [0.1, 0.5, 0.9], "clip_high_threshold": [1.0, 0.25, 1.0]},
        ["datum 0", "position 1", "clip_low_threshold 0.5", "clip_high_threshold", "0.25"],
    ),
    "a token's low over the setting": (
        {"loss_fn": "gspo", **SEQUENCE, "clip_low_threshold": [0.9, 0.9, 1.5]},
        ["datum 0", "clip_low_threshold at position 2", "1.5", "1.0004"],
    ),
    "a token's high under the setting": (
        {"loss_fn": "ppo", **POLICY, "clip_high_threshold": [1.0, 1.0, 0.7]},
        ["datum 0", "clip_high_threshold at position 2", "0.8", "0.7"],
    ),
    "a negative threshold": (
        {"loss_fn": "ppo", **POLICY, "clip_low_threshold": [0.5, -0.5, 0.5]},
        ["datum 0", "clip_low_threshold at position 1", "-0.5"],
    ),
    "a mask of nothing": (
        {"loss_fn": "gspo", **SEQUENCE, "sequence_ratio_mask": [0.0, 0.0, 0.0]},
        ["datum 0", "sequence_ratio_mask"],
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_is_refused_by_name_and_the_model_lives_on(api: Api, case: str) -> None:
    change, words = BAD_BATCHES[case]
    model = api.model()
    answer = api.forward_backward(batch(model, 1, **change))
    assert answer.status_code == 400
    assert all(word in answer.json["detail"] for word in words), answer.json
    assert api.services.oplog.entry(model, 1).kind == "lost_batch", "nothing is enqueued, and the seq is consumed"
    api.commit(model, 1)
    assert api.forward_backward(batch(model, 2)).status_code == 200


def given(name: str) -> Any:
    """A good value of an input for three tokens."""
    return [2, 3, 4] if name == "target_tokens" else [0.9, 0.9, 0.9]


def taker(api: Api, loss_fn: str) -> str:
    """A model that takes the loss."""
    return api.model(model_role="critic" if LOSSES[loss_fn].critic else "policy")


# A custom loss names its inputs itself (test_custom_losses.py).
BUILT_IN = [name for name in LOSSES if name != CUSTOM]
# A value that is wrong in one way, or None for a missing one.
FAULTS: dict[str, Callable[[str], np.ndarray | None]] = {
    "missing": lambda name: None,
    "short": lambda name: np.array(given(name))[:2],
    "three dimensions": lambda name: np.array(given(name)).reshape(3, 1, 1),
    "no number": lambda name: np.array([1e6 if name == "target_tokens" else math.nan] * 3),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("loss_fn", BUILT_IN)
def test_every_input_of_every_loss_is_checked_and_named_with_its_datum(api: Api, loss_fn: str, fault: str) -> None:
    model, spec = taker(api, loss_fn), LOSSES[loss_fn]
    names = [*spec.inputs, *spec.optional]
    good = batch(model, 1, loss_fn=loss_fn, **{name: given(name) for name in names})
    good.data.add().CopyFrom(good.data[0])
    assert api.forward_backward(good).status_code == 200
    for seq, name in enumerate(names, 2):
        message = sdk.ForwardBackwardRequest.FromString(good.SerializeToString())
        message.seq_id = seq
        del message.data[1].loss_fn_inputs[name]
        if (values := FAULTS[fault](name)) is not None:
            set_tensor(message.data[1].loss_fn_inputs[name], name, values)
        answer = api.forward_backward(message)
        if fault == "missing" and name in spec.ones:
            assert answer.status_code == 200, (name, answer.json)
            continue
        assert answer.status_code == 400, (name, answer.json)
        assert f"datum 1: {name}" in answer.json["detail"], answer.json


@pytest.mark.parametrize("loss_fn", BUILT_IN)
def test_an_input_no_datum_has_is_named(api: Api, loss_fn: str) -> None:
    model, names = taker(api, loss_fn), LOSSES[loss_fn].inputs
    for seq, name in enumerate(names, 1):
        others = {other: given(other) for other in (*names, "weights") if other != name}
        answer = api.forward_backward(batch(model, seq, loss_fn=loss_fn, **others))
        assert (answer.status_code, f"datum 0: {name} is missing" in answer.json["detail"]) == (400, True), answer.json


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_a_tokens_thresholds_stand_before_the_settings(api: Api, loss_fn: str) -> None:
    model = api.model()
    inputs = {name: given(name) for name in LOSSES[loss_fn].inputs}
    ranges = {"clip_low_threshold": [0.0, 0.1, 1.2], "clip_high_threshold": [0.2, 0.1, 1.2]}
    settings = {"clip_low_threshold": 0.5, "clip_high_threshold": 0.4}
    answer = api.forward_backward(batch(model, 1, loss_fn=loss_fn, config=settings, **inputs, **ranges))
    assert answer.status_code == 200, answer.json
    equal = {"clip_low_threshold": [1.2, 1.2, 1.2]}  # 1.2 of fp32 is above 1.2 of fp64
    answer = api.forward_backward(
        batch(model, 2, loss_fn=loss_fn, config={"clip_high_threshold": 1.2}, **inputs, **equal)
    )
    assert answer.status_code == 200, answer.json


def test_the_datum_at_fault_is_named(api: Api) -> None:
    model = api.model()
    message = batch(model, 1)
    for tokens in ([4, 5], [6, VOCAB + 1, 7]):
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        set_tensor(added.loss_fn_inputs["target_tokens"], "target_tokens", np.ones(len(tokens)))
    assert "datum 2: model_input at position 1" in api.forward_backward(message).json["detail"]


def image(message: sdk.ForwardBackwardRequest) -> None:
    message.data[0].model_input.add().image.format = "png"


def half_targets(message: sdk.ForwardBackwardRequest) -> None:
    message.data.add().CopyFrom(message.data[0])
    del message.data[1].loss_fn_inputs["target_tokens"]


def text_setting(message: sdk.ForwardBackwardRequest) -> None:
    message.loss_fn_config_v2["loss_id"].text = "x"


def float_targets(message: sdk.ForwardBackwardRequest) -> None:
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = np.ones(3, "<f4").tobytes(), sdk.DTYPE_FLOAT32


def no_data(message: sdk.ForwardBackwardRequest) -> None:
    message.ClearField("data")


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (image, "image"),
        (half_targets, "datum 1: target_tokens"),
        (text_setting, "loss_id"),
        (float_targets, "integers"),
        (no_data, "empty"),
    ],
)
def test_a_malformed_batch_is_refused(api: Api, spoil: Any, word: str) -> None:
    model = api.model()
    message = batch(model, 1)
    spoil(message)
    answer = api.forward_backward(message)
    assert (answer.status_code, word in answer.json["detail"]) == (400, True), answer.json
    assert api.services.oplog.entry(model, 1).kind == "lost_batch"


def many_datums(message: sdk.ForwardBackwardRequest) -> None:
    message.data.extend([message.data[0]] * 1023)


def large_datum(message: sdk.ForwardBackwardRequest) -> None:
    message.data.add().model_input.add().encoded_text.tokens = bytes(200_000)


@pytest.mark.parametrize("enlarge", [many_datums, large_datum])
def test_a_refused_batch_that_another_chunk_may_follow_is_replaced_by_none(api: Api, enlarge: Any) -> None:
    model = api.model()
    bad = batch(model, 1, target_tokens=[VOCAB, 3, 4])
    enlarge(bad)
    assert api.forward_backward(bad).status_code == 400
    assert api.services.oplog.entry(model, 1).kind == "forward_backward"
    assert api.services.oplog.entry(model, 1).doomed


BAD_STEPS: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "negative rate": ({"adam_params": {"learning_rate": -1.0}}, 400, ["learning_rate", "-1.0"]),
    "beta1 of 1": ({"adam_params": {"beta1": 1.0}}, 400, ["beta1", "1.0", "below 1"]),
    "zero eps": ({"adam_params": {"eps": 0.0}}, 400, ["eps", "at least 1.17"]),
    "an eps that is zero in fp32": ({"adam_params": {"eps": 1e-50}}, 400, ["eps", "at least 1.17"]),
    "a rate beyond fp32": ({"adam_params": {"learning_rate": 1e39}}, 400, ["learning_rate", "at most 3.4"]),
    "a decay beyond fp32": ({"adam_params": {"weight_decay": 1e300}}, 400, ["weight_decay", "at most 3.4"]),
    "nan decay": ({"adam_params": {"weight_decay": math.nan}}, 422, ["weight_decay"]),
    # The SDK writes NaN and infinity as null.
    "null rate": ({"adam_params": {"learning_rate": None}}, 422, ["adam_params.learning_rate: Is null", "NaN"]),
    "null eps": ({"adam_params": {"learning_rate": 0.1, "eps": None}}, 422, ["adam_params.eps", "a finite number"]),
    "text rate": ({"adam_params": {"learning_rate": "fast"}}, 422, ["adam_params.learning_rate", "'fast'"]),
    "unknown field": ({"adam_params": {"learning_rat": 0.1}}, 422, ["adam_params.learning_rat", "correct its name"]),
    "adamw": ({"optimizer_params": {"type": "adamw", "learning_rate": 0.1}}, 400, ["adamw", "in adam_params"]),
    "dimuon": ({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, 400, ["dimuon"]),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_bad_step_is_refused_and_its_seq_consumed(api: Api, case: str) -> None:
    change, status, words = BAD_STEPS[case]
    model = api.model()
    answer = api.post("optim_step", {"model_id": model, "seq_id": 1, **change})
    assert answer.status_code == status
    assert all(word in answer.json["detail"] for word in words), answer.json
    assert api.services.oplog.entry(model, 1).kind == "skip"
    late = api.post("optim_step", {"model_id": model, "seq_id": 1, **STEP})
    assert (late.status_code, "was refused" in late.json["detail"]) == (400, True)


def test_a_stranger_can_neither_train_a_model_nor_consume_its_seqs(api: Api, stranger: Api) -> None:
    model = api.model()
    assert stranger.forward_backward(batch(model, 1)).status_code == 404
    assert stranger.forward_backward(batch(model, 1, loss_fn="hinge")).status_code == 404
    assert stranger.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"eps": "x"}}).status_code == 422
    assert api.ops(model) == [0]


def test_an_answer_the_sdk_retries_consumes_no_seq(api: Api, settings: Settings) -> None:
    model = api.model()
    for role in ("trainer", "sampler"):
        api.services.records.delete(Worker.namespace, f"{role}-0")
    restarted = create_app(settings)
    again = Api(restarted.test_client(), restarted.extensions[EXTENSION])
    assert again.forward_backward(batch(model, 1)).status_code == 503
    assert api.forward_backward(batch(model, 1)).status_code == 200


@pytest.mark.parametrize("seq", [0, -1, 2**31 - 1])
def test_odd_seqs_do_no_harm(api: Api, seq: int) -> None:
    model = api.model()
    answer = api.forward_backward(batch(model, seq, loss_fn="hinge"))
    assert answer.status_code == 400
    assert api.forward_backward(batch(model, 1)).status_code == 200


def json_batch(loss_fn: str = "cross_entropy") -> dict[str, Any]:
    """The request of `batch`, as SDKs up to 0.24 send it."""
    tensor = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
    item = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    return {"data": [item], "loss_fn": loss_fn}


def test_an_older_sdks_json_body_is_the_same_op(api: Api) -> None:
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": json_batch()}
    assert api.post("forward_backward", body).status_code == 200
    assert api.forward_backward(batch(model, 1)).json == {"request_id": f"{model}:1", "model_id": model}


def test_an_older_sdks_forward_is_the_same_op_as_a_newer_ones(api: Api) -> None:
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "forward_input": json_batch()}
    assert api.post("forward", body).json == {"request_id": f"{model}:1", "model_id": model}
    newer = batch(model, 1)
    newer.forward_only = True
    assert api.forward_backward(newer).json == {"request_id": f"{model}:1", "model_id": model}
    assert op_of(api, model, 1).forward_only


@pytest.mark.parametrize("route", ["forward", "forward_backward"])
def test_a_refused_forward_costs_no_gradient(api: Api, route: str) -> None:
    model = api.model()
    answer = api.post(route, {"model_id": model, "seq_id": 1, "forward_input": json_batch("hinge")})
    assert (answer.status_code, "hinge" in answer.json["detail"]) == (400, True)
    assert api.services.oplog.entry(model, 1).kind == "skip"


def test_forward_takes_no_batch_that_adds_a_gradient(api: Api) -> None:
    model = api.model()
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": json_batch()}
    answer = api.post("forward", body)
    assert (answer.status_code, "forward_input" in answer.json["detail"]) == (400, True)
    assert api.services.oplog.entry(model, 1).kind == "skip"


@pytest.mark.parametrize("where", ["the call", "its batch", "a datum", "a tensor", "a chunk", "a step"])
def test_fields_a_later_sdk_may_add_are_ignored(api: Api, where: str) -> None:
    model = api.model()
    content = json_batch()
    item = content["data"][0]
    body: dict[str, Any] = {"model_id": model, "seq_id": 1, "forward_input": content}
    step: dict[str, Any] = {"model_id": model, "seq_id": 2, "adam_params": {}}
    added = {
        "the call": body,
        "its batch": content,
        "a datum": item,
        "a tensor": item["loss_fn_inputs"]["target_tokens"],
        "a chunk": item["model_input"]["chunks"][0],
        "a step": step,
    }
    added[where]["of_a_later_sdk"] = {"deep": [1, None]}
    assert [api.post("forward", body).status_code, api.post("optim_step", step).status_code] == [200, 200]


BAD_JSON = {
    "tokens nested": {"model_input": {"chunks": [{"tokens": [[1], [2, 3]]}]}, "loss_fn_inputs": {}},
    "tokens huge": {"model_input": {"chunks": [{"tokens": [2**70]}]}, "loss_fn_inputs": {}},
    "tokens text": {"model_input": {"chunks": [{"tokens": ["a"]}]}, "loss_fn_inputs": {}},
    "no chunks": {"model_input": {}, "loss_fn_inputs": {}},
    "no inputs": {"model_input": {"chunks": [{"tokens": [1]}]}},
    "a number": 7,
    "bad shape": {
        "model_input": {"chunks": [{"tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64", "shape": ["x"]}},
    },
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_a_malformed_json_batch_is_refused(api: Api, case: str) -> None:
    model = api.model()
    content = {"data": [BAD_JSON[case]], "loss_fn": "cross_entropy"}
    answer = api.post("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": content})
    assert (answer.status_code, "datum 0" in answer.json["detail"]) == (400, True), answer.json
    assert api.services.oplog.entry(model, 1).kind == "lost_batch"

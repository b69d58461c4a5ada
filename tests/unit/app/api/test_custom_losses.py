"""create_custom_loss, and the forward_backward calls that name its result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk
from tinker.types import CreateCustomLossResponse, UntypedAPIFuture

from app import create_app
from app.api.base import EXTENSION
from app.domain import ops
from app.domain.records import Loss
from app.settings import Settings
from app.wire import custom_loss
from tests.custom_losses import DPO_RANKS, SDFT_RANKS, body, dpo, parsed, sdft, square
from tests.unit.app.conftest import Api, batch

PAIR = {
    "target_tokens": [2, 3, 4],
    "chosen": [1.0, 0.0, 0.0],
    "rejected": [0.0, 1.0, 1.0],
    "reference": np.float32(0.5),
}


def make(api: Api, session: str, fn: Any = dpo, ranks: dict[str, int] = DPO_RANKS, seq: int = 0) -> str:
    """Creates a loss as the SDK does; returns its id."""
    answer = api.post("create_custom_loss", body(fn, ranks, session, seq))
    assert answer.status_code == 200, answer.json
    found = api.post("retrieve_future", {"request_id": UntypedAPIFuture(**answer.json).request_id})
    assert found.status_code == 200, found.json
    return CreateCustomLossResponse(**found.json).loss_id


def custom(model: str, seq: int, loss_id: str | None, **inputs: Any) -> sdk.ForwardBackwardRequest:
    message = batch(model, seq, loss_fn="custom", **(inputs or PAIR))
    if loss_id is not None:
        message.loss_fn_config_v2["loss_id"].text = loss_id
    return message


def op_of(api: Api, model: str, seq: int = 1) -> ops.ForwardBackward:
    entry = api.services.oplog.entry(model, seq)
    assert entry is not None
    return ops.decode(entry.payload)


def test_the_losses_of_a_session_have_a_bound_that_repeats_and_other_sessions_do_not_meet(
    api: Api, session: str, monkeypatch: pytest.MonkeyPatch
):
    """They lie in the state server's memory, of which every project needs a part."""
    first = make(api, session)
    size = len(api.services.records.get(Loss.namespace, first)["content"])
    monkeypatch.setattr("app.services.training.MOST_LOSS_BYTES", 3 * size)
    for seq in range(1, 3):
        make(api, session, seq=seq)
    refused = api.post("create_custom_loss", body(dpo, DPO_RANKS, session, 3))
    assert refused.status_code == 400
    assert "begin a new session" in refused.text
    assert make(api, session) == first
    make(api, api.session())


@pytest.fixture
def session(api: Api) -> str:
    return api.session()


@pytest.fixture
def model(api: Api, session: str) -> str:
    return api.model(session)


def test_the_journal_holds_the_loss_itself_and_only_what_it_reads(api: Api, session: str, model: str) -> None:
    loss_id = make(api, session)
    answer = api.forward_backward(custom(model, 1, loss_id, **PAIR, mask=[1.0] * 3))
    assert answer.json["request_id"] == f"{model}:1"
    api.services.records.delete(Loss.namespace, loss_id)
    op = op_of(api, model)
    assert op.custom == parsed(dpo, DPO_RANKS)
    assert (op.loss_fn, op.loss_config) == ("custom", {})
    shapes = {name: column.shapes for name, column in op.batch.inputs.items()}
    assert shapes == {"target_tokens": ((3,),), "chosen": ((3,),), "rejected": ((3,),), "reference": ((),)}


def test_integers_stay_integers(api: Api, session: str, model: str) -> None:
    def pick(logprobs: Any, index: Any) -> Any:
        return logprobs[index].sum(), {}

    message = custom(
        model, 1, make(api, session, pick, {"logprobs": 1, "index": 1}), target_tokens=[2, 3, 4], index=[0]
    )
    tensor = message.data[0].loss_fn_inputs["index"]
    tensor.dtype, tensor.dense = sdk.DTYPE_INT64, np.array([2], "<i8").tobytes()
    assert api.forward_backward(message).status_code == 200
    assert op_of(api, model).batch.inputs["index"].values.dtype == np.int64
    message.seq_id = 2
    message.data.add().CopyFrom(message.data[0])
    tensor.dtype, tensor.dense = sdk.DTYPE_FLOAT32, np.array([2], "<f4").tobytes()
    answer = api.forward_backward(message)
    assert (answer.status_code, "datum 1: index is int64" in answer.json["detail"]) == (400, True)


def test_an_older_sdks_json_body_is_the_same_op(api: Api, session: str, model: str) -> None:
    loss_id = make(api, session, square, {"logprobs": 1})
    assert api.forward_backward(custom(model, 1, loss_id, target_tokens=[2, 3, 4])).status_code == 200
    tensor = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
    item = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    content = {"data": [item], "loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    answer = api.post("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": content})
    assert (answer.status_code, answer.json["request_id"]) == (200, f"{model}:1")


def test_a_repeat_gets_the_same_future_and_other_content_a_400(api: Api, session: str) -> None:
    asked = body(dpo, DPO_RANKS, session)
    first, again = (api.post("create_custom_loss", asked) for _ in range(2))
    assert (first.status_code, first.json) == (again.status_code, again.json) == (200, first.json)
    other = api.post("create_custom_loss", body(sdft, SDFT_RANKS, session))
    assert (other.status_code, "custom_loss_seq_id 0" in other.json["detail"]) == (400, True)
    assert make(api, session) == first.json["request_id"]
    assert make(api, session, sdft, SDFT_RANKS, seq=1) != first.json["request_id"]


def test_a_repeat_after_an_upgrade_of_the_costs_gets_the_same_future(
    api: Api, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(custom_loss, "BUDGET", 1)
        first = make(api, session)
    assert make(api, session) == first


def test_losses_and_their_futures_outlive_the_api_process(
    api: Api, session: str, model: str, settings: Settings
) -> None:
    loss_id = make(api, session)
    restarted = create_app(settings)
    again = Api(restarted.test_client(), restarted.extensions[EXTENSION])
    assert make(again, session) == loss_id
    assert again.forward_backward(custom(model, 1, loss_id)).status_code == 200


def test_a_strangers_loss_looks_like_one_that_is_not_there(api: Api, stranger: Api, session: str) -> None:
    loss_id = make(api, session)
    theirs = stranger.model()

    def answers() -> list[tuple[int, str]]:
        asked = [
            stranger.forward_backward(custom(theirs, 1, loss_id)),
            stranger.post("retrieve_future", {"request_id": loss_id}),
            stranger.post("create_custom_loss", body(dpo, DPO_RANKS, session)),
        ]
        return [(answer.status_code, answer.text) for answer in asked]

    foreign = answers()
    assert [status for status, _ in foreign] == [400, 404, 404]
    api.services.records.delete(Loss.namespace, loss_id)
    api.services.records.delete("sessions", session)
    # The first answer consumed its seq: the next call shows that.
    unknown = answers()
    assert unknown[1:] == foreign[1:]
    assert foreign[0][1] == stranger.forward_backward(custom(theirs, 2, loss_id)).text


@pytest.mark.parametrize("request_id", ["x:loss:0", ":loss:0", "x:loss:-1", "x:loss:99999999999", "a:b:loss:0"])
def test_a_future_of_no_loss_is_unknown(api: Api, request_id: str) -> None:
    answer = api.post("retrieve_future", {"request_id": request_id})
    assert (answer.status_code, answer.json["detail"]) == (404, f"future {request_id!r} does not exist")


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in PAIR.items() if key != name}


BAD_BATCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "input missing": (without("chosen"), ["datum 0: chosen is missing", "dpo"]),
    "targets missing": (without("target_tokens"), ["datum 0: target_tokens is missing"]),
    "rank of an input": ({**PAIR, "chosen": np.ones((3, 1))}, ["datum 0: chosen has shape [3, 1]", "rank 1"]),
    "rank of a scalar": ({**PAIR, "reference": np.ones(2)}, ["datum 0: reference has shape [2]", "rank 0"]),
    "rank of the targets": ({**PAIR, "target_tokens": np.ones((3, 2))}, ["datum 0: target_tokens has shape [3, 2]"]),
    "length of the targets": ({**PAIR, "target_tokens": [2, 3]}, ["datum 0: target_tokens", "[2]", "3 tokens"]),
    "not a number": ({**PAIR, "rejected": [0.0, np.nan, 0.0]}, ["datum 0: rejected at position 1", "nan"]),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_batch_that_does_not_fit_its_loss_is_refused_by_name(api: Api, session: str, model: str, case: str) -> None:
    inputs, words = BAD_BATCHES[case]
    answer = api.forward_backward(custom(model, 1, make(api, session), **inputs))
    assert answer.status_code == 400
    assert all(word in answer.json["detail"] for word in words), answer.json
    assert api.services.oplog.entry(model, 1).kind == "lost_batch"


def test_the_datum_at_fault_is_named(api: Api, session: str, model: str) -> None:
    message = custom(model, 1, make(api, session))
    message.data.add().CopyFrom(message.data[0])
    tensor = message.data[1].loss_fn_inputs["chosen"]
    del tensor.shape[:]
    tensor.shape.extend([1, 3])
    assert "datum 1: chosen has shape [1, 3]" in api.forward_backward(message).json["detail"]


def test_other_settings_stay_refused(api: Api, session: str, model: str) -> None:
    message = custom(model, 1, make(api, session))
    message.loss_fn_config_v2["beta"].number = 1.0
    assert "'beta' is unknown to custom" in api.forward_backward(message).json["detail"]
    message = custom(model, 2, None)
    message.loss_fn_config_v2["loss_id"].number = 1.0
    assert "needs the loss_id" in api.forward_backward(message).json["detail"]
    assert "needs the loss_id" in api.forward_backward(custom(model, 3, None)).json["detail"]


def test_a_graph_that_is_not_allowed_is_a_400_and_nothing_is_kept(api: Api, session: str) -> None:
    asked = body(dpo, DPO_RANKS, session)
    asked["graph"]["nodes"][4]["target"] = "os.system"
    answer = api.post("create_custom_loss", asked)
    assert answer.status_code == 400
    assert "'os.system'" in answer.json["detail"] and "docs/custom-losses.md" in answer.json["detail"]
    assert list(api.services.records.list(Loss.namespace)) == []


BAD_BODIES: dict[str, tuple[dict[str, Any], int]] = {
    "no graph": ({"graph": None}, 422),
    "graph a text": ({"graph": "x"}, 422),
    "inputs a text": ({"inputs": "x"}, 422),
    "no inputs": ({"inputs": []}, 400),
    "name missing": ({"name": None}, 422),
    "negative number": ({"custom_loss_seq_id": -1}, 422),
    "no such session": ({"session_id": "gone"}, 404),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_malformed_body_is_refused(api: Api, session: str, case: str) -> None:
    change, status = BAD_BODIES[case]
    answer = api.post("create_custom_loss", {**body(dpo, DPO_RANKS, session), **change})
    assert (answer.status_code, bool(answer.json["detail"])) == (status, True)


def test_a_body_that_is_too_large_is_refused_before_it_is_parsed(api: Api, session: str) -> None:
    answer = api.post("create_custom_loss", data=b"[" * 600_000, content_type="application/json")
    assert answer.status_code == 413
    nested = api.post("create_custom_loss", data=b"[" * 20_000, content_type="application/json")
    assert nested.status_code == 400

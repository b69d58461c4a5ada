"""No value in any field of any body makes the server fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import pictures
from tests.custom_losses import body as custom_loss
from tests.custom_losses import square
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.api.test_sampling import body as sample_body
from tests.unit.app.conftest import BASE, Api, batch

ODD = [None, True, -1, 0, 10**400, 2**63, 1.5, 1e308, float("nan"), "", "\ud800", "x\x00y", "../..", "x" * 5000, [], {}]
ODD += [[None], [[1]], {"a": {"b": 1}}, [10**400], [1] * 100]

TENSOR = {"data": [1, 2], "dtype": "int64", "shape": [2]}
DATUM = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": TENSOR}}
BATCH = {"data": [DATUM], "loss_fn": "dro", "loss_fn_config": {"beta": 1.0}}
PICTURE = pictures.text(pictures.encoded(pictures.picture(2, 2)))
PROMPT = {"chunks": [{"tokens": [1]}, {"type": "image", "format": "png", "data": PICTURE, "expected_tokens": 1}]}
SAVE = {"path": "a", "seq_id": 1, "ttl_seconds": 7200, "user_metadata": {"a": "b"}, "overwrite": True}


def bodies(api: Api) -> dict[str, dict[str, Any]]:
    session = api.session()
    model = api.model(session)
    path = save_checkpoint(api, model)
    lora = {"rank": 4, "seed": 1, "train_mlp": True}
    upload = {"base_model": BASE, "lora_config": lora, "destination_project_id": None}
    upload_id = api.post("external_weights_upload_start", upload).json["upload_id"]
    metrics = {"model_id": model, "step": 1, "metrics": {"reward": 0.5}}
    create = {"session_id": session, "model_seq_id": 7, "base_model": BASE, "lora_config": lora, "user_metadata": {}}
    return {
        "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "display_name": "x"},
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/finish": {"reason": {"type": "success"}},
        "create_model": {**create, "optimizer_config": {"type": "adamw"}},
        "get_info": {"model_id": model},
        "create_custom_loss": custom_loss(square, {"logprobs": 1}, session),
        "forward_backward": {"model_id": model, "seq_id": 1, "forward_backward_input": BATCH},
        "forward": {"model_id": model, "seq_id": 1, "forward_input": BATCH},
        "unload_model": {"model_id": model},
        "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1, "eps": 0.1}},
        "save_weights": {"model_id": model, **SAVE},
        "save_weights_external": {"model_id": model, **SAVE, "age_encryption_recipients": []},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1, "kind": "inflight"},
        "checkpoints/search": {
            "project_ids": None,
            "user_metadata": {"a": "b"},
            "checkpoint_type": "training",
            "owner": {"type": "own", "owner_urns": []},
            "base_models": [BASE],
            "cursor": {"last_created_at": "2026-01-01T00:00:00+00:00", "last_checkpoint_uuid": "x"},
        },
        "external_weights_upload_start": upload,
        "external_weights_upload_finish": {"upload_id": upload_id},
        "load_weights": {"model_id": model, "seq_id": 1, "path": path, "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "model_path": path},
        "asample": sample_body(api.sampler(), sampling_params={"seed": 1, "top_k": 5, "stop": [1], "max_tokens": 1}),
        "retrieve_future": {"request_id": f"{model}:0"},
        "telemetry": {"events": [{"event": "GENERIC_EVENT", "event_name": "metrics", "event_data": metrics}]},
    }


def variants(body: Any) -> Iterator[Any]:
    """Variants of the body: every value in it, and the body itself, replaced by every odd value."""
    yield from ODD
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        for odd in variants(value):
            changed = copy.copy(body)
            changed[key] = odd
            yield changed


@pytest.fixture
def all_bodies(api: Api) -> dict[str, dict[str, Any]]:
    made = bodies(api)
    made["asample"]["prompt"] = PROMPT
    return made


def test_odd_values_are_answered_and_never_a_5xx(api: Api, all_bodies: dict[str, dict[str, Any]]) -> None:
    tried = 0
    for path, body in all_bodies.items():
        for changed in variants(body):
            answer = api.post(path, data=json.dumps(changed), content_type="application/json")
            assert answer.status_code < 500, (path, str(changed)[:300], answer.text)
            assert answer.data
            tried += 1
    assert tried > 1000


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_a_protobuf_body_with_one_wrong_byte_is_never_a_5xx(api: Api, byte: int) -> None:
    body = batch(api.model(), 1, loss_fn="dro", config={"beta": 1.0}).SerializeToString()
    for position in range(len(body)):
        changed = body[:position] + bytes([byte]) + body[position + 1 :]
        answer = api.post("forward_backward", data=changed, content_type="application/x-protobuf")
        assert answer.status_code < 500, (position, answer.text)

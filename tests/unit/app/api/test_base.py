from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import zstandard
from flask import Flask
from werkzeug.test import TestResponse

from app import create_app
from app.api.base import EXTENSION, UNPACKED_AT_ONCE
from app.services.training import TrainingService
from app.settings import LimitSettings, Settings
from app.stores.redis.client import connect
from tests.protobuf_bytes import field
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.api.test_sampling import body as sample
from tests.unit.app.conftest import BASE, Api, add_worker, batch

SMALL = 2**16
JSON = "application/json"


@pytest.fixture(scope="module")
def limited(settings: Settings) -> Flask:
    """An application with low limits."""
    limits = LimitSettings(
        small_body_bytes=SMALL,
        json_values=20_000,
        json_depth=16,
        datums=2,
        batch_tokens=50,
        samples=4,
        sampled_tokens=30,
    )
    return create_app(settings.model_copy(update={"limits": limits}))


@pytest.fixture
def near(limited: Flask, state_url: str) -> Api:
    with connect(state_url) as client:
        client.flushall()
    services = limited.extensions[EXTENSION]
    for role in ("trainer", "sampler"):
        add_worker(services, role)
    return Api(limited.test_client(), services)


def packed(api: Api, path: str, body: bytes, content_type: str = "application/x-protobuf") -> TestResponse:
    headers = {"X-API-Key": api.key, "Content-Encoding": "zstd"}
    return api.client.post(f"/api/v1/{path}", data=body, content_type=content_type, headers=headers)


def test_a_compressed_batch_is_the_same_call_as_the_plain_one(api: Api) -> None:
    message = batch(api.model(), 1)
    first = packed(api, "forward_backward", zstandard.compress(message.SerializeToString()))
    again = api.forward_backward(message)
    assert (first.status_code, first.json) == (200, again.json)
    message.data[0].model_input[0].encoded_text.tokens += bytes(4)
    assert api.forward_backward(message).status_code == 400


def test_a_compressed_json_body_is_read_as_well(api: Api) -> None:
    answer = packed(api, "create_session", zstandard.compress(b'{"tags": ["a"]}'), "application/json")
    assert answer.status_code == 200


def test_a_fault_in_a_compressed_batch_consumes_its_seq_and_half_of_one_does_not(api: Api) -> None:
    model = api.model()
    whole = zstandard.compress(batch(model, 1, tokens=[10**6]).SerializeToString())
    assert packed(api, "forward_backward", whole[:-3]).status_code == 400
    assert api.ops(model) == [0]
    answer = packed(api, "forward_backward", whole)
    assert (answer.status_code, "token 1000000" in answer.json["detail"]) == (400, True)
    assert api.ops(model) == [0, 1]


def test_more_unpacked_bodies_than_a_process_may_hold_are_refused_until_others_have_ended(
    api: Api, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = batch(api.model(), 1).SerializeToString()
    largest = _largest(message, settings)
    admit, held, begun, may_end = TrainingService.forward_backward, [], threading.Semaphore(0), threading.Event()

    def wait(*args: Any) -> Any:
        held.append(args)
        begun.release()
        may_end.wait(60)
        return admit(*args)

    monkeypatch.setattr(TrainingService, "forward_backward", wait)
    ask = partial(packed, api, "forward_backward", largest)
    with ThreadPoolExecutor(UNPACKED_AT_ONCE) as pool:
        calls = [pool.submit(ask) for _ in range(UNPACKED_AT_ONCE)]
        try:
            assert all(begun.acquire(timeout=60) for _ in calls)
            others = [ask() for _ in range(3)]
            plain = packed(api, "create_session", zstandard.compress(b"{}"), JSON)
        finally:
            may_end.set()
    assert [(answer.status_code, answer.headers.get("Retry-After")) for answer in others] == [(503, "5")] * 3
    assert (plain.status_code, len(held)) == (200, UNPACKED_AT_ONCE)
    assert {call.result().status_code for call in calls} == {200}
    assert ask().status_code == 200, "ended calls hold nothing"


def test_a_body_that_is_read_again_to_consume_its_seq_is_counted_once(api: Api, settings: Settings) -> None:
    model, calls = api.model(), 2 * UNPACKED_AT_ONCE
    for seq in range(1, calls + 1):
        wrong = batch(model, seq, tokens=[10**6]).SerializeToString()
        assert packed(api, "forward_backward", _largest(wrong, settings)).status_code == 400
    assert api.ops(model) == list(range(calls + 1))


def _largest(message: bytes, settings: Settings) -> bytes:
    """The message with an unknown field, packed: unpacked it is one byte smaller than the largest body."""
    return zstandard.compress(message + field(100, bytes(settings.api.max_body_bytes - len(message) - 6)))


def test_only_a_call_with_a_batch_or_a_prompt_may_be_large(near: Api) -> None:
    padding = " " * SMALL
    model = near.model()
    for path in ("create_session", "optim_step", "get_info", "save_weights"):
        answer = near.post(path, data=json.dumps({"model_id": model, "seq_id": 1}) + padding, content_type=JSON)
        assert (path, answer.status_code) == (path, 413)
    assert near.post("asample", data=json.dumps(sample(near.sampler())) + padding, content_type=JSON).status_code == 200
    assert near.forward_backward(batch(model, 1)).status_code == 200


def test_a_small_body_has_few_values_however_many_a_batch_may_have(api: Api) -> None:
    many = {f"k{i}": i for i in range(40_000)}
    answer = api.post("create_session", {"user_metadata": many})
    assert (answer.status_code, "at most 32768" in answer.json["detail"]) == (413, True)
    prompt = sample(api.sampler())
    assert api.post("asample", {**prompt, **many}).status_code == 200, "unknown fields are dropped"


def test_a_message_names_some_wrong_fields_and_not_thousands(api: Api) -> None:
    answer = api.post("checkpoints/search", {"user_metadata": {f"k{i}": i for i in range(1000)}})
    assert answer.status_code == 422
    assert answer.json["detail"].endswith("; and more") and answer.json["detail"].count("Not a valid string") == 20


REFUSED: dict[str, tuple[Any, int, str]] = {
    "deep": ({"user_metadata": {"a": [[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]}}, 400, "16 levels"),
    "many values": ({"tags": [1] * 2, "user_metadata": {"a": [1] * 20_001}}, 413, "20000"),
    "long metadata": ({"user_metadata": {"a": "x" * 17_000}}, 422, "16384"),
    "many tags": ({"tags": ["a"] * 65}, 422, "tags"),
    "a long tag": ({"tags": ["a" * 513]}, 422, "tags"),
    "a long name": ({"display_name": "a" * 513}, 422, "display_name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_session_is_described_within_limits(near: Api, case: str) -> None:
    body, status, why = REFUSED[case]
    body = json.dumps(body, separators=(",", ":"))
    answer = packed(near, "create_session", zstandard.compress(body.encode()), JSON)
    assert (answer.status_code, why in answer.json["detail"]) == (status, True), answer.json


def test_a_batch_over_the_limits_is_refused_and_its_seq_consumed(near: Api) -> None:
    model = near.model()
    many = batch(model, 1)
    for _ in range(2):
        many.data.add().CopyFrom(many.data[0])
    long = batch(model, 2, tokens=[1] * 51, target_tokens=[1] * 51)
    for message, why in ((many, "3 datums; at most 2"), (long, "51 tokens; at most 50")):
        answer = near.forward_backward(message)
        assert (answer.status_code, why in answer.json["detail"]) == (400, True)
    assert near.ops(model) == [0, 1, 2]


@pytest.mark.parametrize(
    ("count", "tokens", "why"),
    [(5, 1, "num_samples 5"), (4, 8, "num_samples 4 * max_tokens 8 are 32 tokens; one call may sample at most 30")],
)
def test_one_call_samples_no_more_than_the_settings_allow(near: Api, count: int, tokens: int, why: str) -> None:
    asked = {**sample(near.sampler()), "num_samples": count, "sampling_params": {"max_tokens": tokens}}
    answer = near.post("asample", asked)
    assert (answer.status_code, why in answer.json["detail"]) == (400, True), answer.json
    fits = {**asked, "num_samples": 3, "sampling_params": {"max_tokens": 8}}
    assert near.post("asample", fits).status_code == 200


NUMBERED: dict[str, tuple[str, dict[str, Any]]] = {
    "create_model": ("model_seq_id", {"base_model": BASE}),
    "load_weights": ("model_seq_id", {"path": "tinker://a:train:0/weights/a"}),
    "copy_weights": ("model_seq_id", {"source_path": "tinker://a:train:0/weights/a"}),
    "create_sampling_session": ("sampling_session_seq_id", {"base_model": BASE}),
    "save_weights_for_sampler": ("sampling_session_seq_id", {"seq_id": 1}),
    "create_custom_loss": ("custom_loss_seq_id", {"name": "a", "inputs": [], "graph": {}}),
}


@pytest.mark.parametrize("call", NUMBERED)
def test_a_number_that_becomes_part_of_an_id_has_at_most_nine_digits(api: Api, call: str) -> None:
    field, body = NUMBERED[call]
    session = api.session()
    place = {"model_id": api.model(session)} if "seq_id" in body else {"session_id": session}
    fits, longer = (api.post(call, {**place, **body, field: number}) for number in (10**9 - 1, 10**9))
    assert fits.status_code != 422, fits.json
    assert (longer.status_code, field in longer.json["detail"]) == (422, True), longer.json


def test_a_seq_has_the_same_bound_in_each_call(api: Api) -> None:
    """A seq within the bound is refused only because it is too far ahead."""
    model = api.model()
    saved = save_checkpoint(api, model)
    for call, body in (("optim_step", {}), ("save_weights", {"path": "a"}), ("load_weights", {"path": saved})):
        seqs = (2**31 - 1, 2**31)
        answers = [api.post(call, {"model_id": model, "seq_id": seq, **body}) for seq in seqs]
        assert [answer.status_code for answer in answers] == [400, 422], call


def test_the_sdk_is_asked_to_compress_only_when_the_settings_say_so(settings: Settings, api: Api) -> None:
    assert api.post("client/config", {}).json["proto_compress_fwdbwd"] is False
    on = settings.model_copy(update={"api": settings.api.model_copy(update={"compress_batches": True})})
    client = create_app(on).test_client()
    answer = client.post("/api/v1/client/config", json={}, headers={"X-API-Key": api.key})
    assert answer.json["proto_compress_fwdbwd"] is True


@pytest.mark.parametrize(
    "path", ["api/v1/asample", "oai/api/v1/chat/completions", "anthropic/v1/messages", "api/v1/create_session"]
)
def test_a_body_that_is_not_sent_as_json_is_named_and_not_read_as_empty(api: Api, path: str) -> None:
    kind = "application/x-www-form-urlencoded"  # as curl sends it
    headers = {"X-API-Key": api.key}
    refused = api.client.post(f"/{path}", data=b'{"model": "a"}', content_type=kind, headers=headers)
    assert refused.status_code == 400
    assert kind in refused.text and "send the header Content-Type: application/json" in refused.text
    assert "Content-Type" not in api.client.post(f"/{path}", headers=headers).text, "there is no body"

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse
from tinker.types.datum import _KEY_TO_TYPE
from tinker.types.get_server_capabilities_response import GetServerCapabilitiesResponse

from app import create_app
from app.domain.ops import Batch, Ragged
from app.domain.progress import Recorded
from app.domain.records import Refusal, Session, Worker
from app.settings import BaseModelSettings, SamplerSettings, Settings
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.records import dump, load
from app.wire.bodies import check_batch, check_datums, check_parts
from tests.unit.app.api.test_limits import HOURS, Limit, limit
from tests.unit.app.conftest import API, BASE, CONTEXT, KEY, OTHER_KEY, Api
from tests.unit.app.tenant import Tenant

__all__ = ["limit"]


def test_the_sdk_takes_the_config_and_its_sampling_limit_from_poll_capacity(api: Api) -> None:
    config = ClientConfigResponse(**api.post("client/config", {"sdk_version": "0.38.0"}).json)
    assert config.sample_max_concurrent_requests == api.services.settings.api.poll_capacity
    assert config.custom_loss_server_side
    assert not (config.pjwt_auth_enabled or config.proto_compress_fwdbwd)
    assert not config.sample_use_retrieve_futures
    assert config.sample_join_sampling_session
    assert ClientDynamicConfigResponse(**api.post("client/dynamic_config", {}).json).sample_cancel_enabled


def test_batch_polls_can_be_switched_on_and_a_client_never_has_more_under_way_than_its_queue_takes(
    settings: Settings,
) -> None:
    small = SamplerSettings(queue_requests=7)
    bases = (*settings.base_models, BaseModelSettings(name="small", path="x", sampler=small))
    batched = settings.api.model_copy(update={"batch_polls": True})
    app = create_app(settings.model_copy(update={"base_models": bases, "api": batched}))
    answer = app.test_client().post(f"{API}/client/config", json={}, headers={"X-API-Key": KEY}).json
    assert (answer["sample_use_retrieve_futures"], answer["sample_max_concurrent_requests"]) == (True, 7)


def _config(settings: Settings, body_bytes: int = 2**26, **limits: int) -> ClientConfigResponse:
    """The client config of a server with these limits."""
    update = {
        "limits": settings.limits.model_copy(update=limits),
        "api": settings.api.model_copy(update={"max_body_bytes": body_bytes}),
    }
    client = create_app(settings.model_copy(update=update)).test_client()
    return ClientConfigResponse(**client.post(f"{API}/client/config", json={}, headers={"X-API-Key": KEY}).json)


def test_the_sdk_cuts_batches_to_what_one_call_may_have(settings: Settings) -> None:
    """Otherwise a server with lower limits refuses the chunks that the SDK chooses by itself."""
    own = ClientConfigResponse()
    limits: tuple[dict[str, int], ...] = ({}, {"datums": 3, "body_bytes": 2**20}, {"batch_tokens": 1000})
    found = [_config(settings, **limit) for limit in limits]
    assert [(config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count) for config in found] == [
        (own.fwdbwd_max_chunk_len, own.fwdbwd_max_chunk_bytes_count),
        (3, 2**19),
        (own.fwdbwd_max_chunk_len, 4000),
    ]


@pytest.mark.parametrize(("limit", "most"), [("json_values", 1000), ("batch_tokens", 300), ("datums", 7)])
def test_every_chunk_that_the_sdk_cuts_is_within_a_low_limit(settings: Settings, limit: str, most: int) -> None:
    """Each datum has all inputs that the SDK knows, and the loss has a config."""
    limits = settings.limits.model_copy(update={limit: most})
    training: Any = SimpleNamespace(holder=SimpleNamespace(_client_config=_config(settings, **{limit: most})))
    inputs = {name: np.ones(10, kind) for name, kind in _KEY_TO_TYPE.items()}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1] * 10), loss_fn_inputs=inputs)
    chunks = [chunk.data for chunk in TrainingClient._chunked_requests_generator(training, [datum] * 100)]
    assert len(chunks) > 1
    for seq, data in enumerate(chunks, 1):
        content = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={str(i): 0.5 for i in range(6)})
        request = types.ForwardBackwardRequest(model_id="m", seq_id=seq, forward_backward_input=content)
        check_parts(forward_backward_request_to_proto(request).SerializeToString(), limits)
        check_datums(len(data), limits)
        check_batch(Batch(Ragged.of([np.zeros(10)] * len(data), np.int32), {}), limits)


@pytest.mark.parametrize("batch_polls", [False, True])
def test_every_sdk_is_asked_to_use_the_transport_that_loses_no_cancellation(
    settings: Settings, batch_polls: bool
) -> None:
    """`ServiceClient.close` waits for tasks it has cancelled: heartbeat, flags, token, polls. pyqwest can lose that."""
    app = create_app(settings.model_copy(update={"api": settings.api.model_copy(update={"batch_polls": batch_polls})}))
    answer = app.test_client().post(f"{API}/client/config", json={}, headers={"X-API-Key": KEY}).json
    assert ClientConfigResponse().use_pyqwest_transport, "the SDK's own default, should nothing be said"
    assert not ClientConfigResponse(**answer).use_pyqwest_transport


@pytest.mark.parametrize(
    "body", [b"\xff not json", b"", b"x" * (3 * 2**20), b'{"events": [{"event": "SESSION_START"}]}', b"[" * 1000]
)
def test_telemetry_is_accepted_whatever_it_holds(api: Api, body: bytes) -> None:
    assert api.post("telemetry", data=body).json == {"status": "accepted"}


def _metrics(model: str, reward: float = 0.5) -> dict[str, Any]:
    data = {"model_id": model, "step": 1, "metrics": {"reward": reward}}
    return {"event": "GENERIC_EVENT", "event_name": "metrics", "event_data": data}


def test_a_client_records_metrics_of_its_runs(api: Api) -> None:
    model = api.model()
    assert api.post("telemetry", {"events": [_metrics(model), {"event": "SESSION_END"}]}).json["status"] == "accepted"
    assert api.services.records.recorded([model]) == [[Recorded(1, {"reward": 0.5})]]


def test_metrics_of_a_repeated_call_are_kept_once(api: Api) -> None:
    runs = [api.model(), api.model()]
    events = [{**_metrics(run, reward), "event_id": f"{run} {reward}"} for run in runs for reward in (0.5, 0.75)]
    without_id = _metrics(runs[1], 0.25)
    for _ in range(2):
        assert api.post("telemetry", {"events": [*events, without_id]}).status_code == 200
    once, twice = [Recorded(1, {"reward": 0.5}), Recorded(1, {"reward": 0.75})], Recorded(1, {"reward": 0.25})
    assert api.services.records.recorded(runs) == [once, [*once, twice, twice]]


@pytest.mark.parametrize("others", [["missing:train:0"], ["of others"], ["of others", "missing:train:0"]])
def test_metrics_of_a_run_of_others_are_skipped_as_those_of_a_missing_one(api: Api, others: list[str]) -> None:
    """A run that is gone costs the other runs of the call nothing: the SDK drops a call that is refused."""
    foreign, stranger = api.model(), replace(api, key=OTHER_KEY)
    own = stranger.model()
    named = [foreign if other == "of others" else other for other in others]
    alone = stranger.post("telemetry", {"events": [_metrics(other) for other in named]})
    assert (alone.status_code, alone.json["detail"]) == (404, f"model {named[0]!r} does not exist")
    assert stranger.post("telemetry", {"events": [_metrics(run) for run in (*named, own)]}).status_code == 200
    assert api.services.records.recorded([foreign, own]) == [[], [Recorded(1, {"reward": 0.5})]]


def test_metrics_need_a_key_and_a_role_that_may_train(tenant: Tenant) -> None:
    model, events = tenant.ids["model"], {"events": [_metrics(tenant.ids["model"])]}
    for key, status in ((tenant.key("viewer"), 403), (tenant.key("member", ["sample"]), 403)):
        api = replace(tenant.api, key=key)
        assert api.post("telemetry", events).status_code == status
        assert api.post("telemetry", {"events": [{"event": "SESSION_START"}]}).status_code == 200
    assert tenant.api.services.records.recorded([model]) == [[]]


def test_a_call_with_metrics_counts_once_and_other_telemetry_not_at_all(api: Api, limit: Limit) -> None:
    runs = [api.model(), api.model()]
    limit(requests_per_s=HOURS)
    for _ in range(3):
        assert api.post("telemetry", {"events": [{"event": "SESSION_START"}]}).status_code == 200
    assert api.post("telemetry", {"events": [_metrics(run) for run in runs]}).status_code == 200
    assert api.get("limits").json["project"]["used"]["requests_per_s"] == pytest.approx(0.1, rel=1e-2), "a call in 10 s"
    assert api.post("telemetry", {"events": [_metrics(runs[0], 0.75)]}).status_code == 429
    assert api.services.records.recorded(runs) == [[Recorded(1, {"reward": 0.5})]] * 2, "of the refused call none"


def test_wrong_metrics_are_refused_in_words(api: Api) -> None:
    answer = api.post("telemetry", {"events": [{**_metrics("x"), "event_data": {"model_id": "x", "step": "first"}}]})
    assert answer.status_code == 400 and "step" in answer.json["detail"]


def test_a_session_beats_and_keeps_its_first_finish(api: Api, state_url: str) -> None:
    session = api.session()

    def stored() -> Session:
        return load(Session, api.services.records.get("sessions", session))

    with connect(state_url) as client:
        client.zadd(keys.SESSIONS_HEARD, {session: 1})
        assert api.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"}).status_code == 200
        assert client.zscore(keys.SESSIONS_HEARD, session) > 1
    for reason in ("errored", "success"):
        body = {"reason": {"type": reason}, "detail": None}
        assert api.post(f"sessions/{session}/finish", body).status_code == 200
    assert stored().status == "errored"


@pytest.mark.parametrize("reason", ["open", "expired", "", "x" * 65])
def test_what_says_that_a_session_was_not_finished_is_no_reason_to_finish_it_with(api: Api, reason: str) -> None:
    session = api.session()
    answer = api.post(f"sessions/{session}/finish", {"reason": {"type": reason}})
    assert answer.status_code == 422
    assert load(Session, api.services.records.get("sessions", session)).status == "open"
    assert api.post(f"sessions/{session}/finish", {"reason": {"type": "of a newer SDK"}}).status_code == 200


@pytest.mark.parametrize("path", ["session_heartbeat", "finish"])
def test_another_ones_session_looks_missing(api: Api, stranger: Api, path: str) -> None:
    def ask(who: Api, session: str) -> tuple[int, str]:
        if path == "finish":
            answer = who.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        else:
            answer = who.post(path, {"session_id": session})
        return answer.status_code, answer.text

    session = api.session()
    foreign = ask(stranger, session)
    api.services.records.delete("sessions", session)
    assert foreign == ask(api, session)
    assert foreign[0] == 404


def test_capabilities_and_readiness_follow_the_live_workers(api: Api) -> None:
    entry = GetServerCapabilitiesResponse(**api.get("get_server_capabilities").json).supported_models[0]
    assert (entry.model_name, entry.max_context_length, entry.trainable, entry.sampleable) == (
        BASE,
        CONTEXT,
        True,
        True,
    )
    assert api.get("get_server_capabilities").json["supported_models"][0]["dtype"] == "float32"
    api.services.records.delete(Worker.namespace, "sampler-0")
    assert api.get("get_server_capabilities").json["supported_models"][0]["sampleable"] is False
    answer = api.client.get("/readyz")
    assert (answer.status_code, answer.json) == (503, {"ready": False, "missing": [f"sampler for {BASE}"]})


def test_a_model_that_workers_refuse_is_not_waited_for_and_its_callers_are_told_why(api: Api) -> None:
    records, refused = api.services.records, Refusal.id("sampler", BASE)
    records.put(Refusal.namespace, refused, dump(Refusal("sampler", BASE, "no layer fits")))
    assert api.get("get_server_capabilities").json["supported_models"][0]["refusals"] == {}, "a live worker counts more"
    records.delete(Worker.namespace, "sampler-0")
    assert api.client.get("/readyz").json == {"ready": True, "missing": []}
    assert api.get("get_server_capabilities").json["supported_models"][0]["refusals"] == {"sampler": "no layer fits"}


def test_a_stack_whose_every_worker_is_refused_is_not_ready(api: Api) -> None:
    for role in ("trainer", "sampler"):
        api.services.records.put(Refusal.namespace, role, dump(Refusal(role, BASE, "no layer fits")))
        api.services.records.delete(Worker.namespace, f"{role}-0")
    missing = [f"trainer for {BASE}", f"sampler for {BASE}"]
    assert api.client.get("/readyz").json == {"ready": False, "missing": missing}


def test_a_worker_that_is_not_healthy_counts_as_missing(api: Api) -> None:
    records = api.services.records
    (fields,) = [fields for node, fields in records.list(Worker.namespace) if node == "trainer-0"]
    records.put(Worker.namespace, "trainer-0", {**fields, "healthy": "false"})
    assert api.client.get("/readyz").json == {"ready": False, "missing": [f"trainer for {BASE}"]}
    assert api.get("get_server_capabilities").json["supported_models"][0]["trainable"] is False

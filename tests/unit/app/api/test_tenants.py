"""Account keys at the API: each sees the resources of its projects, and changes what its role and its scopes allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from werkzeug.test import TestResponse

from app.domain.accounts import SCOPES, Scope
from app.domain.results import PROTOBUF, Result
from app.errors import Unauthorized
from app.services.tenants.accounts import AccountService
from app.services.tenants.authentication import Tokens
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.suspension import SUSPENSION, Suspension
from tests.unit.app.conftest import API, BASE, Api
from tests.unit.app.tenant import SAMPLED, Tenant

SAID = {"role": "user", "content": "x"}
GRAPH = {"name": "x", "inputs": [], "graph": {}}
# The routes that take a scope, grouped by the scopes of which a key needs one. Each is a call on the resources of
# `Tenant`, with its body, or None for none.
NEEDS: dict[tuple[Scope, ...], dict[tuple[str, str], dict[str, Any] | None]] = {
    ("train", "sample"): {
        ("POST", "create_session"): {},
        ("POST", "session_heartbeat"): {"session_id": "{session}"},
        ("POST", "sessions/{session}/finish"): {"reason": {"type": "success"}},
    },
    ("train",): {
        ("POST", "create_model"): {"session_id": "{session}", "model_seq_id": 5, "base_model": BASE},
        ("POST", "create_custom_loss"): {"session_id": "{session}", "custom_loss_seq_id": 0, **GRAPH},
        ("POST", "forward_backward"): None,
        ("POST", "forward"): {"model_id": "{model}", "seq_id": 1, "forward_input": {"data": []}},
        ("POST", "unload_model"): {"model_id": "{model}"},
        ("POST", "optim_step"): {"model_id": "{model}", "seq_id": 1, "adam_params": {}},
        ("POST", "save_weights"): {"model_id": "{model}", "seq_id": 1, "path": "b"},
        ("POST", "save_weights_for_sampler"): {"model_id": "{model}", "seq_id": 1, "path": "b"},
        ("POST", "save_weights_external"): {"model_id": "{model}", "seq_id": 1, "path": "b"},
        ("POST", "load_weights"): {"model_id": "{model}", "seq_id": 1, "path": "{path}", "optimizer": True},
        ("GET", "captures"): None,
    },
    ("sample",): {
        ("POST", "create_sampling_session"): {
            "session_id": "{session}",
            "sampling_session_seq_id": 5,
            "base_model": BASE,
        },
        ("POST", "join_sampling_session"): {"sampling_session_id": "{sampler}"},
        ("POST", "asample"): {"sampling_session_id": "{sampler}", "seq_id": 1, **SAMPLED},
        ("POST", "retrieve_futures"): {"target": {"sampling_session_id": "{sampler}"}, "prev_cursor": 1},
        ("POST", "cancel_future"): {"request_id": "{sample}"},
        ("DELETE", "queue/{sample}"): None,
        ("POST", "/oai/api/v1/completions"): {"model": BASE, "prompt": [1]},
        ("POST", "/oai/api/v1/chat/completions"): {"model": BASE, "messages": [SAID]},
        ("POST", "/anthropic/api/v1/messages"): {"model": BASE, "max_tokens": 1, "messages": [SAID]},
        ("POST", "/anthropic/v1/messages"): {"model": BASE, "max_tokens": 1, "messages": [SAID]},
    },
    ("manage",): {
        ("DELETE", "captures"): None,
        ("DELETE", "training_runs/{model}"): None,
        ("PUT", "training_runs/{model}/checkpoints/weights/a/ttl"): {"ttl_seconds": 3600},
        ("POST", "training_runs/{model}/checkpoints/weights/a/publish"): None,
        ("DELETE", "training_runs/{model}/checkpoints/weights/a/publish"): None,
        ("POST", "copy_weights"): {"source_path": "{path}", "session_id": "{session}", "model_seq_id": 6},
        ("PUT", "sessions/{session}/project"): {"project_id": "{project}"},
        ("DELETE", "training_runs/{model}/checkpoints/weights/a"): None,
    },
    ("train", "manage"): {
        ("POST", "external_weights_upload_start"): {"base_model": BASE, "lora_config": {"rank": 4}},
        ("POST", "external_weights_upload_finish"): {"upload_id": "{upload}"},
    },
}
CHANGES = {call: body for calls in NEEDS.values() for call, body in calls.items()}
READS: dict[tuple[str, str], dict[str, Any] | None] = {
    ("POST", "get_info"): {"model_id": "{model}"},
    ("POST", "retrieve_future"): {"request_id": "{model}:0"},
    ("GET", "samplers/{sampler}"): None,
    ("GET", "training_runs/{model}"): None,
    ("GET", "training_runs/{model}/checkpoints"): None,
    ("GET", "sessions/{session}"): None,
    ("GET", "sessions/{session}/trace_export"): None,
    ("POST", "weights_info"): {"tinker_path": "{path}"},
    ("GET", "auth/apikey/me"): None,
    ("GET", "limits?project_id={project}"): None,
    ("GET", "queue"): None,
}


def test_what_is_made_is_of_the_keys_project(tenant: Tenant) -> None:
    records = tenant.api.services.records
    for namespace, name in (("sessions", "session"), ("models", "model"), ("samplers", "sampler")):
        assert records.get(namespace, tenant.ids[name])["owner"] == f'"{tenant.project}"'


def test_a_viewer_reads_all_and_changes_nothing(tenant: Tenant) -> None:
    viewer = tenant.key("viewer")
    before = tenant.state()
    for call, body in CHANGES.items():
        answer = tenant.call(viewer, call, body)
        assert (call, answer.status_code) == (call, 403), answer.json
        assert "viewer" in answer.text, call
    assert tenant.state() == before
    for call, body in READS.items():
        assert (call, tenant.call(viewer, call, body).status_code) == (call, 200)


def test_a_result_that_a_viewer_read_is_still_there_for_the_client_that_waits_for_it(tenant: Tenant) -> None:
    viewer, sample = tenant.key("viewer"), tenant.ids["sample"]
    tenant.api.services.oplog.finish_sample(sample, Result(b"x", PROTOBUF))
    with connect(tenant.api.services.settings.redis.url) as client:
        before = tenant.state(), client.ttl(keys.future(sample))
        assert tenant.call(viewer, ("POST", "retrieve_future"), {"request_id": "{sample}"}).data == b"x"
        assert tenant.call(viewer, ("POST", "cancel_future"), {"request_id": "{sample}"}).status_code == 403
        assert tenant.state() == before[0]
        assert client.ttl(keys.future(sample)) > before[1] - 60
    asked = {"target": {"sampling_session_id": tenant.ids["sampler"]}}
    completed = replace(tenant.api, key=tenant.key("member")).post("retrieve_futures", asked).json["completions"]
    assert [completion["request_id"] for completion in completed] == [sample]


def test_a_key_without_scopes_reads_all_and_changes_nothing(tenant: Tenant) -> None:
    key, sample = tenant.key("admin", ()), tenant.ids["sample"]
    tenant.api.services.oplog.finish_sample(sample, Result(b"x", PROTOBUF))
    with connect(tenant.api.services.settings.redis.url) as client:
        before, left_s = tenant.state(), client.ttl(keys.future(sample))
        for call, body in CHANGES.items():
            answer = tenant.call(key, call, body)
            assert (call, answer.status_code) == (call, 403), answer.json
            assert "scope" in answer.text, call
        assert tenant.state() == before
        reads = [*READS.items(), (("POST", "retrieve_future"), {"request_id": sample})]
        for call, body in reads:
            assert (call, tenant.call(key, call, body).status_code) == (call, 200)
        assert tenant.state() == before
        assert client.ttl(keys.future(sample)) > left_s - 60


def test_a_user_outside_the_project_finds_none_of_it(tenant: Tenant, accounts: AccountService) -> None:
    """The answer is that for a missing resource, byte for byte. This includes users of the same organisation."""
    elsewhere = accounts.add_project(tenant.organisation, "pans").id
    key = tenant.key("admin", project=elsewhere)
    absent = replace(
        tenant,
        ids={
            **tenant.ids,
            "session": "0" * 36,
            "model": f"{'0' * 36}:train:0",
            "path": f"tinker://{'0' * 36}:train:0/weights/a",
            "sampler": f"{'0' * 36}:sample:0",
            "sample": f"{'0' * 36}:sample:0:0",
        },
    )
    before, tried = tenant.state(), 0
    for call, body in [*CHANGES.items(), *READS.items()]:
        if not any(f"{{{name}}}" in f"{call} {body}" for name in tenant.ids) and "forward_backward" not in call:
            continue
        foreign, missing = (at.call(key, call, body) for at in (tenant, absent))
        texts = []
        for at, answer in ((tenant, foreign), (absent, missing)):
            text = answer.text
            for name in ("path", "sample", "sampler", "model", "session"):
                text = text.replace(at.ids[name], f"<{name}>")
            texts.append(text)
        assert (call, foreign.status_code, texts[0]) == (call, 404, texts[1])
        assert missing.status_code == 404
        tried += 1
    assert tried >= 20
    assert tenant.state() == before


def test_every_route_that_takes_a_scope_is_tried_and_takes_the_listed_ones(tenant: Tenant) -> None:
    """A new route belongs in NEEDS. Those of the console are tried in tests/unit/app/console."""
    application = tenant.api.client.application
    views = application.view_functions.items()
    scoped = {name: view.scopes for name, view in views if hasattr(view, "scopes") and not name.startswith("console.")}
    paths = application.url_map.bind("")
    needed = {
        paths.match(tenant.url(path), method)[0]: scopes for scopes, calls in NEEDS.items() for method, path in calls
    }
    assert needed == scoped


@pytest.mark.parametrize(
    ("scope", "call"),
    [
        ("train", ("POST", "optim_step")),
        ("sample", ("POST", "asample")),
        ("manage", ("PUT", "training_runs/{model}/checkpoints/weights/a/ttl")),
    ],
)
def test_a_scope_lets_its_own_calls_through_alone(tenant: Tenant, scope: Scope, call: tuple[str, str]) -> None:
    for given in sorted(SCOPES):
        answer = tenant.call(tenant.key("member", (given,)), call, CHANGES[call])
        # The folder store of these tests holds no such checkpoint's files; that its expiry is noted is all there is.
        assert answer.status_code == (200 if given == scope else 403), (given, answer.json)


def test_a_viewers_malformed_call_uses_no_seq_up(tenant: Tenant) -> None:
    body = {"model_id": tenant.ids["model"], "seq_id": 1, "adam_params": {"learning_rate": "much"}}
    assert tenant.call(tenant.key("viewer"), ("POST", "optim_step"), body).status_code == 422
    assert tenant.api.ops(tenant.ids["model"]) == [0]
    assert tenant.call(tenant.key("member"), ("POST", "optim_step"), body).status_code == 422
    assert tenant.api.ops(tenant.ids["model"]) == [0, 1]


def test_colleagues_work_on_each_others_runs(tenant: Tenant) -> None:
    for role in ("member", "admin"):
        body = {"model_id": tenant.ids["model"], "seq_id": 1, "adam_params": {}}
        assert tenant.call(tenant.key(role), ("POST", "optim_step"), body).status_code == 200


def test_a_user_of_two_projects_takes_a_checkpoint_from_one_to_the_other(
    tenant: Tenant, accounts: AccountService
) -> None:
    other = accounts.add_project(tenant.organisation, "pans").id
    user = accounts.add_user(tenant.organisation, "jo@example.org").id
    accounts.set_role(user, tenant.project, "viewer")
    accounts.set_role(user, other, "member")
    api = replace(tenant.api, key=accounts.add_key(user, other, SCOPES)[1])
    session = api.post("create_session", {"project_id": other}).json["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": tenant.ids["path"], "optimizer": True}
    model = api.post("load_weights", body).json["model_id"]
    assert api.services.records.get("models", model)["owner"] == f'"{other}"'
    missing = [api.post("create_session", {"project_id": id_}) for id_ in (tenant.project, "project-0")]
    assert [answer.status_code for answer in missing] == [404, 404]
    assert missing[0].text.replace(tenant.project, "") == missing[1].text.replace("project-0", "")


def test_a_key_says_whose_it_is(tenant: Tenant) -> None:
    answer = tenant.call(tenant.key("viewer", ("train",)), ("GET", "auth/apikey/me"), None)
    assert answer.json["key_id"] > 0
    assert answer.json["details"] == {
        "org_details": {"name": "Tinkers"},
        "user_details": {"email": "viewer@example.org"},
    }
    assert (answer.json["project_id"], answer.json["scopes"]) == (tenant.project, ["train"])


def test_a_key_revokes_itself_even_without_scopes(tenant: Tenant) -> None:
    key = tenant.key("viewer", ())
    assert tenant.call(key, ("DELETE", "auth/apikey/me"), None).status_code == 200
    answer = tenant.call(key, ("GET", "auth/apikey/me"), None)
    assert (answer.status_code, "revoked" in answer.json["detail"]) == (401, True)


def test_a_poll_that_was_suspended_gets_nothing_once_its_key_is_revoked(tenant: Tenant) -> None:
    key = tenant.key("member")
    suspension = Suspension(lambda suspension: None)

    def poll() -> TestResponse:
        return tenant.api.client.post(
            f"{API}/retrieve_future",
            json={"request_id": tenant.ids["sample"]},
            headers={"X-API-Key": key},
            environ_overrides={SUSPENSION: suspension},
        )

    poll()
    assert suspension.is_suspended
    tenant.call(key, ("DELETE", "auth/apikey/me"), None)
    suspension.end()
    answer = poll()
    assert (answer.status_code, "revoked" in answer.json["detail"]) == (401, True)


def test_a_key_works_on_after_the_state_server_was_emptied_and_a_revoked_one_does_not(tenant: Tenant) -> None:
    works, revoked = tenant.key("member"), tenant.key("viewer")
    assert tenant.call(revoked, ("DELETE", "auth/apikey/me"), None).status_code == 200
    with connect(tenant.api.services.settings.redis.url) as client:
        client.flushall()
    asked = [tenant.call(key, ("GET", "auth/apikey/me"), None) for key in (works, revoked, "tml-000000000000.x")]
    assert [answer.status_code for answer in asked] == [200, 401, 401]
    assert asked[0].json["project_id"] == tenant.project
    assert "revoked" in asked[1].json["detail"]


def test_a_key_of_the_settings_says_where_it_stands(api: Api) -> None:
    described = api.get("auth/apikey/me").json
    assert set(described) >= {"key_id", "name", "note", "details"}
    refused = api.client.delete(f"{API}/auth/apikey/me", headers={"X-API-Key": api.key})
    assert (refused.status_code, "api_keys" in refused.json["detail"]) == (403, True)
    assert api.get("auth/apikey/me").json == described


def test_tokens_are_off_until_they_are_switched_on(api: Api) -> None:
    assert api.post("client/config", {}).json["pjwt_auth_enabled"] is False
    assert api.post("auth/token", {}).status_code == 404


def test_a_token_that_is_too_old_asks_for_another(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens("s" * 32, -3600)
    monkeypatch.setattr(api.services.authenticator, "_tokens", tokens)
    monkeypatch.setattr(api.services.own_key, "_tokens", tokens)
    old = replace(api, key=api.post("auth/token", {}).json["jwt"])
    answer = old.get("auth/apikey/me")
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, 'Bearer error="invalid_token"')
    monkeypatch.setattr(tokens, "_lifetime_s", 3600)
    new = replace(api, key=api.post("auth/token", {}).json["jwt"])
    assert new.get("auth/apikey/me").json == api.get("auth/apikey/me").json
    monkeypatch.setattr(tokens, "_lifetime_s", 7200)
    other = new.post("auth/token", {}).json["jwt"]
    assert tokens.key_of(other) == tokens.key_of(new.key), "one made with it ends with it"
    assert "WWW-Authenticate" not in replace(api, key="tml-x").get("auth/apikey/me").headers


def test_a_call_that_waits_gets_an_error_once_its_key_was_revoked(tenant: Tenant) -> None:
    authenticator, key = tenant.api.services.authenticator, tenant.key("member")
    caller = authenticator(key)
    authenticator.check(caller)
    tenant.accounts.revoke(caller.key_id)
    with pytest.raises(Unauthorized, match="revoked"):
        authenticator.check(caller)

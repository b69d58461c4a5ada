"""Account keys at the API: each sees the resources of its projects, and changes what its role and its scopes allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.domain.accounts import SCOPES, Scope
from app.domain.results import PROTOBUF, Result
from app.services.tenants.access import Tokens
from app.services.tenants.accounts import AccountService
from app.stores.redis import keys
from app.stores.redis.client import connect
from tests.unit.app.conftest import API, BASE, Api
from tests.unit.app.tenant import SAMPLED, Place

GRAPH = {"name": "x", "inputs": [], "graph": {}}
# Every route that takes a scope, as it is called on the resources of `Place`: the body, or None for none.
CHANGES: dict[tuple[str, str], dict[str, Any] | None] = {
    ("POST", "create_session"): {},
    ("POST", "session_heartbeat"): {"session_id": "{session}"},
    ("POST", "sessions/{session}/finish"): {"reason": {"type": "success"}},
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
    ("POST", "create_sampling_session"): {
        "session_id": "{session}",
        "sampling_session_seq_id": 5,
        "base_model": BASE,
    },
    ("POST", "join_sampling_session"): {"sampling_session_id": "{sampler}"},
    ("POST", "asample"): {"sampling_session_id": "{sampler}", "seq_id": 1, **SAMPLED},
    ("POST", "cancel_future"): {"request_id": "{sample}"},
    ("DELETE", "queue/{sample}"): None,
    ("DELETE", "training_runs/{model}"): None,
    ("PUT", "training_runs/{model}/checkpoints/weights/a/ttl"): {"ttl_seconds": 3600},
    ("POST", "training_runs/{model}/checkpoints/weights/a/publish"): None,
    ("DELETE", "training_runs/{model}/checkpoints/weights/a/publish"): None,
    ("POST", "copy_weights"): {"source_path": "{path}", "session_id": "{session}", "model_seq_id": 6},
    ("PUT", "sessions/{session}/project"): {"project_id": "{project}"},
    ("DELETE", "training_runs/{model}/checkpoints/weights/a"): None,
    ("POST", "/oai/api/v1/completions"): {"model": BASE, "prompt": [1]},
    ("POST", "/oai/api/v1/chat/completions"): {"model": BASE, "messages": [{"role": "user", "content": "x"}]},
}
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


def test_what_is_made_is_of_the_keys_project(place: Place) -> None:
    records = place.api.services.records
    for namespace, name in (("sessions", "session"), ("models", "model"), ("samplers", "sampler")):
        assert records.get(namespace, place.ids[name])["owner"] == f'"{place.project}"'


def test_a_viewer_reads_all_and_changes_nothing(place: Place) -> None:
    viewer = place.key("viewer")
    before = place.state()
    for call, body in CHANGES.items():
        answer = place.call(viewer, call, body)
        assert (call, answer.status_code) == (call, 403), answer.json
        assert "viewer" in answer.text, call
    assert place.state() == before
    for call, body in READS.items():
        assert (call, place.call(viewer, call, body).status_code) == (call, 200)


def test_a_result_that_a_viewer_read_is_there_as_before_for_whoever_waits_for_it(place: Place) -> None:
    viewer, sample = place.key("viewer"), place.ids["sample"]
    place.api.services.oplog.finish_sample(sample, Result(b"x", PROTOBUF))
    with connect(place.api.services.settings.redis.url) as client:
        before = place.state(), client.ttl(keys.future(sample))
        assert place.call(viewer, ("POST", "retrieve_future"), {"request_id": "{sample}"}).data == b"x"
        assert place.call(viewer, ("POST", "cancel_future"), {"request_id": "{sample}"}).status_code == 403
        assert place.state() == before[0]
        assert client.ttl(keys.future(sample)) > before[1] - 60
    asked = {"target": {"sampling_session_id": place.ids["sampler"]}}
    told = replace(place.api, key=place.key("member")).post("retrieve_futures", asked).json["completions"]
    assert [completion["request_id"] for completion in told] == [sample]


def test_a_key_without_scopes_reads_all_and_changes_nothing(place: Place) -> None:
    key = place.key("admin", ())
    before = place.state()
    for call, body in CHANGES.items():
        answer = place.call(key, call, body)
        assert (call, answer.status_code) == (call, 403), answer.json
        assert "scope" in answer.text, call
    assert place.state() == before
    for call, body in READS.items():
        assert (call, place.call(key, call, body).status_code) == (call, 200)


def test_whoever_is_not_in_the_project_finds_none_of_it(place: Place, accounts: AccountService) -> None:
    """The answer is that for a missing resource, byte for byte. This includes users of the same organisation."""
    elsewhere = accounts.add_project(place.organisation, "pans").id
    key = place.key("admin", project=elsewhere)
    absent = replace(
        place,
        ids={
            **place.ids,
            "session": "0" * 36,
            "model": f"{'0' * 36}:train:0",
            "path": f"tinker://{'0' * 36}:train:0/weights/a",
            "sampler": f"{'0' * 36}:sample:0",
            "sample": f"{'0' * 36}:sample:0:0",
        },
    )
    before, tried = place.state(), 0
    for call, body in [*CHANGES.items(), *READS.items()]:
        if not any(f"{{{name}}}" in f"{call} {body}" for name in place.ids) and "forward_backward" not in call:
            continue
        foreign, missing = (at.call(key, call, body) for at in (place, absent))
        texts = []
        for at, answer in ((place, foreign), (absent, missing)):
            text = answer.text
            for name in ("path", "sample", "sampler", "model", "session"):
                text = text.replace(at.ids[name], f"<{name}>")
            texts.append(text)
        assert (call, foreign.status_code, texts[0]) == (call, 404, texts[1])
        assert missing.status_code == 404
        tried += 1
    assert tried >= 20
    assert place.state() == before


def test_every_route_that_takes_a_scope_is_tried(place: Place) -> None:
    """A new route belongs in CHANGES."""
    application = place.api.client.application
    scoped = {name for name, view in application.view_functions.items() if hasattr(view, "scopes")}
    paths = application.url_map.bind("")
    assert {paths.match(place.url(path), method)[0] for method, path in CHANGES} == scoped


@pytest.mark.parametrize(
    ("scope", "call"),
    [
        ("train", ("POST", "optim_step")),
        ("sample", ("POST", "asample")),
        ("manage", ("PUT", "training_runs/{model}/checkpoints/weights/a/ttl")),
    ],
)
def test_a_scope_lets_its_own_calls_through_alone(place: Place, scope: Scope, call: tuple[str, str]) -> None:
    for given in sorted(SCOPES):
        answer = place.call(place.key("member", (given,)), call, CHANGES[call])
        # The folder store of these tests holds no such checkpoint's files; that its expiry is noted is all there is.
        assert answer.status_code == (200 if given == scope else 403), (given, answer.json)


def test_a_viewers_malformed_call_uses_no_seq_up(place: Place) -> None:
    body = {"model_id": place.ids["model"], "seq_id": 1, "adam_params": {"learning_rate": "much"}}
    assert place.call(place.key("viewer"), ("POST", "optim_step"), body).status_code == 422
    assert place.api.ops(place.ids["model"]) == [0]
    assert place.call(place.key("member"), ("POST", "optim_step"), body).status_code == 422
    assert place.api.ops(place.ids["model"]) == [0, 1]


def test_colleagues_work_on_each_others_runs(place: Place) -> None:
    for role in ("member", "admin"):
        body = {"model_id": place.ids["model"], "seq_id": 1, "adam_params": {}}
        assert place.call(place.key(role), ("POST", "optim_step"), body).status_code == 200


def test_a_user_of_two_projects_takes_a_checkpoint_from_one_to_the_other(
    place: Place, accounts: AccountService
) -> None:
    other = accounts.add_project(place.organisation, "pans").id
    user = accounts.add_user(place.organisation, "jo@example.org").id
    accounts.set_role(user, place.project, "viewer")
    accounts.set_role(user, other, "member")
    api = replace(place.api, key=accounts.add_key(user, other, SCOPES)[1])
    session = api.post("create_session", {"project_id": other}).json["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": place.ids["path"], "optimizer": True}
    model = api.post("load_weights", body).json["model_id"]
    assert api.services.records.get("models", model)["owner"] == f'"{other}"'
    missing = [api.post("create_session", {"project_id": id_}) for id_ in (place.project, "project-0")]
    assert [answer.status_code for answer in missing] == [404, 404]
    assert missing[0].text.replace(place.project, "") == missing[1].text.replace("project-0", "")


def test_a_key_says_whose_it_is(place: Place) -> None:
    answer = place.call(place.key("viewer", ("train",)), ("GET", "auth/apikey/me"), None)
    assert answer.json["key_id"] > 0
    assert answer.json["details"] == {
        "org_details": {"name": "Tinkers"},
        "user_details": {"email": "viewer@example.org"},
    }
    assert (answer.json["project_id"], answer.json["scopes"]) == (place.project, ["train"])


def test_a_key_revokes_itself_even_without_scopes(place: Place) -> None:
    key = place.key("viewer", ())
    assert place.call(key, ("DELETE", "auth/apikey/me"), None).status_code == 200
    answer = place.call(key, ("GET", "auth/apikey/me"), None)
    assert (answer.status_code, "revoked" in answer.json["detail"]) == (401, True)


def test_a_key_works_on_after_the_state_server_was_emptied_and_a_revoked_one_does_not(place: Place) -> None:
    works, revoked = place.key("member"), place.key("viewer")
    assert place.call(revoked, ("DELETE", "auth/apikey/me"), None).status_code == 200
    with connect(place.api.services.settings.redis.url) as client:
        client.flushall()
    asked = [place.call(key, ("GET", "auth/apikey/me"), None) for key in (works, revoked, "tml-000000000000.x")]
    assert [answer.status_code for answer in asked] == [200, 401, 401]
    assert asked[0].json["project_id"] == place.project
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

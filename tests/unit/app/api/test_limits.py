"""Limits at the API: the calls that count, the text of a refusal, and no run that waits for a refused call."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from app.domain.accounts import SCOPES
from app.domain.limits import Limits
from app.domain.results import Result
from app.services.tenants.accounts import AccountService
from app.stores.redis.client import connect
from tests.fuzz.test_odd_values import DATUM
from tests.security.test_tenants import ask, calls
from tests.unit.app.api import test_copies as copies
from tests.unit.app.api.test_auth import CONSOLE
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api, batch
from tests.unit.app.tenant import Tenant

Limit = Callable[..., None]
RUN, CHECKPOINT = "/api/v1/training_runs/<run>", "/api/v1/training_runs/<run>/checkpoints/<kind>/<name>"
FREE = {
    "POST /api/v1/session_heartbeat",
    "POST /api/v1/retrieve_futures",
    "POST /api/v1/sessions/<session_id>/finish",
    "POST /api/v1/unload_model",
    "POST /api/v1/cancel_future",
    "DELETE /api/v1/queue/<request_id>",
    f"DELETE {RUN}",
    f"DELETE {CHECKPOINT}",
    "DELETE /api/v1/captures",
}
"""Of what changes something: what lets go of it, or says that a client is there."""
ELSEWHERE = {
    "PUT /api/v1/sessions/<session_id>/project",
    "POST /oai/api/v1/completions",
    "POST /oai/api/v1/chat/completions",
    "POST /anthropic/api/v1/messages",
    "POST /anthropic/v1/messages",
}
"""It has tests of its own, below. The calls of other clients need a tokenizer, and are admitted as `asample` is."""
METRICS = {"POST /api/v1/telemetry"}
"""It takes a scope, and counts, only where it holds metrics, as it does here."""
# The bucket does not refill noticeably while a test runs.
HOURS = 0.0001


@pytest.fixture
def limit(api: Api, monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Sets the [limits.project] section of the settings."""
    limits = api.services.quotas._limits

    def change(**found: float) -> None:
        monkeypatch.setattr(limits, "_default", Limits(**found))
        limits._found.clear()

    limits._found.clear()
    yield change
    limits._found.clear()


def save(api: Api, model: str, seq: int, path: str = "kept") -> Any:
    return api.post("save_weights", {"model_id": model, "seq_id": seq, "path": path})


def step(api: Api, model: str, seq: int) -> Any:
    return api.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}})


def changes(api: Api) -> set[str]:
    """Every "METHOD rule" of the API that takes a scope."""
    application = api.client.application
    found = [rule for rule in application.url_map.iter_rules() if not rule.rule.startswith(CONSOLE)]
    rules = [rule for rule in found if hasattr(_view(application, rule), "scopes")]
    return {f"{method} {rule.rule}" for rule in rules for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}}


def _view(application: Any, rule: Any) -> Any:
    return application.view_functions[rule.endpoint]


def test_what_makes_or_changes_something_counts_and_nothing_else_does(api: Api, limit: Limit) -> None:
    rows, counting = {**calls(api)}, (changes(api) | METRICS) - FREE - ELSEWHERE
    del rows["POST /api/v1/forward_backward#custom"]
    for name, part in (("forward", "forward_input"), ("forward_backward", "forward_backward_input")):
        rows[f"POST /api/v1/{name}"].body[part] = {"data": [DATUM], "loss_fn": "cross_entropy"}
    rows["POST /api/v1/create_custom_loss"].body["custom_loss_seq_id"] = 9
    limit(requests_per_s=HOURS)
    assert api.post("create_session", {}).status_code == 200, "which empties the bucket"
    one_each = {label.partition("#")[0]: (label, call) for label, call in rows.items()}
    for name in counting:
        answer = ask(api, *one_each[name]) if name in one_each else api.post("create_session", {})
        assert (name, answer.status_code) == (name, 429), answer.text
        assert "requests_per_s" in answer.text and int(answer.headers["Retry-After"]) > 60
    for name, row in one_each.items():
        if name not in counting | ELSEWHERE:
            assert ask(api, *row).status_code != 429, name


def test_a_call_that_was_put_off_is_taken_in_later_under_its_seq_and_counts_once(api: Api, limit: Limit) -> None:
    model = api.model()
    limit(tokens_per_s=HOURS)
    first = api.forward_backward(batch(model, 1))
    refused = api.forward_backward(batch(model, 2))
    assert (first.status_code, refused.status_code, api.ops(model)) == (200, 429, [0, 1])
    again = api.forward_backward(batch(model, 1))
    assert (again.status_code, again.json) == (200, first.json), "a repeat is neither refused nor charged"
    limit(tokens_per_s=1e9)
    assert api.forward_backward(batch(model, 2)).status_code == 200
    assert api.ops(model) == [0, 1, 2]


def test_no_call_waits_for_a_save_that_was_over_the_limit(api: Api, limit: Limit) -> None:
    """The client gets a final refusal, so it never sends that seq again."""
    model = api.model()
    save_checkpoint(api, model)
    limit(storage_bytes=10)
    answer = save(api, model, 1)
    assert (answer.status_code, answer.json["error"]) == (403, "LimitReached")
    assert "10 bytes of checkpoints, and its storage_bytes is 10: delete some" in answer.json["detail"]
    assert "Retry-After" not in answer.headers
    assert step(api, model, 2).status_code == 200
    assert api.services.oplog.waiting(model, 1) == ("skip", "optim_step"), "seq 2 may run at once"
    again = save(api, model, 1)
    assert (again.status_code, "storage_bytes" in again.json["detail"]) == (400, True)
    limit(storage_bytes=11)
    assert save(api, model, 3).status_code == 200
    limit(storage_bytes=10)
    assert save(api, model, 3).status_code == 200, "a repeat"


@pytest.mark.parametrize("route", ["save_weights", "save_weights_external", "save_weights_for_sampler"])
def test_whatever_is_saved_is_stored_with_a_path_and_without(api: Api, limit: Limit, route: str) -> None:
    model = api.model()
    limit(storage_bytes=0)
    assert api.post(route, {"model_id": model, "seq_id": 1, "path": "a"}).status_code == 403
    if route == "save_weights_for_sampler":
        body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
        assert api.post(route, body).status_code == 403


def test_a_refused_model_is_not_there_and_what_ends_makes_room(api: Api, limit: Limit) -> None:
    session, first = api.session(), api.model()
    limit(live_models=1)
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    answer = api.post("create_model", body)
    assert (answer.status_code, answer.json["error"]) == (403, "LimitReached")
    assert "1 live models, and its live_models is 1: finish a session, or delete a run" in answer.json["detail"]
    assert api.get(f"training_runs/{session}:train:0").status_code == 404
    api.post(f"sessions/{first.partition(':')[0]}/finish", {"reason": {"type": "success"}})
    made = api.post("create_model", body)
    assert (made.status_code, api.post("create_model", body).json) == (200, made.json), "a repeat"


def test_of_many_models_made_at_once_as_many_are_there_as_the_limit_says(
    api: Api, limit: Limit, state_url: str
) -> None:
    """The refused ones leave nothing behind, neither a record nor a journal."""
    limit(live_models=3)
    session, app = api.session(), api.client.application

    def create(seq: int) -> int:
        asked = {"session_id": session, "model_seq_id": seq, "base_model": BASE}
        return replace(api, client=app.test_client()).post("create_model", asked).status_code

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(create, range(60)))
    assert sorted(found) == [200] * 3 + [403] * 57
    refused = [seq for seq, status in enumerate(found) if status == 403]
    with connect(state_url) as client:
        assert not [key for seq in refused for key in client.scan_iter(f"*{session}:train:{seq}*")]
    assert api.get("training_runs").json["cursor"]["total_count"] == 3


def test_a_repeat_of_what_is_there_is_admitted_though_nothing_else_is(api: Api, limit: Limit) -> None:
    session, source = api.session(), copies.saved(api)
    sampler = ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE})
    rows = calls(api)
    loss = ("create_custom_loss", rows["POST /api/v1/create_custom_loss"].body)
    target = {"destination_project_id": copies.project(api)}

    def repeats() -> list[Any]:
        return [api.post(*sampler).json, api.post(*loss).json, copies.copy(api, source, "once", **target).json]

    before = repeats()
    limit(requests_per_s=HOURS, storage_bytes=0)
    assert api.post("create_session", {}).status_code == 200, "which empties the bucket"
    assert repeats() == before
    assert copies.copy(api, source, "another", **target).status_code == 403


def test_a_copy_counts_for_who_made_it_and_not_for_whose_it_was(api: Api, stranger: Api, limit: Limit) -> None:
    source = copies.saved(api, public=True, key=api.get("limits").json["key"]["id"])
    size = api.get("limits").json["project"]["used"]["storage_bytes"]
    limit(storage_bytes=size)
    assert copies.copy(stranger, source).status_code == 200
    assert copies.copy(stranger, source).status_code == 403
    for one in (api, stranger):
        shown = one.get("limits").json
        assert shown["project"]["used"]["storage_bytes"] == shown["key"]["used"]["storage_bytes"] == size > 0


def test_limits_say_what_holds_and_what_is_used(api: Api, limit: Limit) -> None:
    model, sampler = api.model(), api.sampler()
    save_checkpoint(api, model)
    sampled = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 4}}
    api.post("asample", {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 3, **sampled})
    limit(tokens_per_s=HOURS, live_models=4, live_sessions=2, weight=2)
    api.forward_backward(batch(model, 1))
    found = api.get("limits").json["project"]
    assert found["id"] == api.get("auth/apikey/me").json["project_id"]
    assert found["limits"] == {
        "requests_per_s": None,
        "tokens_per_s": HOURS,
        "live_models": 4,
        "live_sessions": 2,
        "storage_bytes": None,
        "concurrent_samples": None,
        "weight": 2,
        "checkpoint_ttl_s": None,
        "keep_checkpoints": None,
        "monthly_budget": None,
        "capture_days": None,
    }
    assert found["used"].pop("tokens_per_s") == pytest.approx(0.3, rel=1e-2), "3 tokens in 10 s"
    assert found["used"] == {
        "requests_per_s": None,
        "live_models": 1,
        "live_sessions": 2,
        "storage_bytes": 10,
        "concurrent_samples": 3,
        "monthly_budget": None,
    }


def test_a_session_over_the_limit_is_refused_until_one_is_finished(api: Api, limit: Limit) -> None:
    first = api.session()
    limit(live_sessions=1)
    answer = api.post("create_session", {})
    assert (answer.status_code, answer.json["error"]) == (403, "LimitReached")
    assert "has 1 sessions that have not ended, and its live_sessions is 1: finish one" in answer.json["detail"]
    assert api.get("sessions").json["sessions"] == [first]
    api.post(f"sessions/{first}/finish", {"reason": {"type": "success"}})
    assert api.post("create_session", {}).status_code == 200


def test_a_repeat_of_create_session_returns_its_session_and_is_charged_once(tenant: Tenant) -> None:
    def create(caller: Api, idempotency_key: str) -> Any:
        headers = {"X-API-Key": caller.key, "X-Idempotency-Key": idempotency_key}
        return caller.client.post("/api/v1/create_session", json={}, headers=headers)

    caller, colleague = (replace(tenant.api, key=tenant.key("member")) for _ in range(2))
    id_ = caller.key.removeprefix("tml-").partition(".")[0]
    tenant.accounts.set_limits(id_, {"live_sessions": 1, "requests_per_s": HOURS})
    first, repeat = create(caller, "one"), create(caller, "one")
    assert (first.status_code, repeat.status_code, repeat.json) == (200, 200, first.json)
    assert create(caller, "two").status_code == 403
    theirs = create(colleague, "one")
    assert (theirs.status_code, theirs.json != first.json) == (200, True), "the call of another API key"


def test_a_client_learns_how_many_samples_it_may_have_under_way(api: Api, limit: Limit) -> None:
    most = api.post("client/config", {}).json["sample_max_concurrent_requests"]
    limit(concurrent_samples=7)
    assert api.post("client/config", {}).json["sample_max_concurrent_requests"] == 7 < most
    limit(concurrent_samples=10**9)
    assert api.post("client/config", {}).json["sample_max_concurrent_requests"] == most


def test_a_key_has_limits_of_its_own_beside_its_projects(tenant: Tenant, limit: Limit) -> None:
    slow, other = (replace(tenant.api, key=tenant.key("member")) for _ in range(2))
    id_ = slow.key.removeprefix("tml-").partition(".")[0]
    tenant.accounts.set_limits(id_, {"requests_per_s": HOURS, "live_models": 1})
    tenant.accounts.set_limits(tenant.project, {"live_models": 3})
    shown = slow.get("limits").json
    assert (shown["key"]["id"], shown["key"]["limits"]["live_models"]) == (id_, 1)
    assert (shown["project"]["id"], shown["project"]["limits"]["live_models"]) == (tenant.project, 3)
    assert slow.post("create_session", {}).status_code == 200
    refused = slow.post("create_session", {})
    assert (refused.status_code, f"key {id_} " in refused.text) == (429, True)
    assert other.post("create_session", {}).status_code == 200


def test_another_project_shows_its_limits_to_who_is_in_it(tenant: Tenant, accounts: AccountService) -> None:
    key = tenant.key("viewer")
    shown = replace(tenant.api, key=key).get(f"limits?project_id={tenant.project}")
    assert (shown.status_code, shown.json["project"]["id"]) == (200, tenant.project)
    misspelt = replace(tenant.api, key=key).get(f"limits?project={tenant.project}")
    assert (misspelt.status_code, "project" in misspelt.json["detail"]) == (422, True)
    elsewhere = accounts.add_project(tenant.organisation, "pans").id
    foreign, missing = (
        replace(tenant.api, key=key).get(f"limits?project_id={id_}") for id_ in (elsewhere, "project-0")
    )
    assert (foreign.status_code, missing.status_code) == (404, 404)
    assert foreign.text.replace(elsewhere, "") == missing.text.replace("project-0", "")


def test_whoever_was_taken_out_of_his_keys_project_sees_its_use_no_more(
    tenant: Tenant, accounts: AccountService
) -> None:
    user = accounts.add_user(tenant.organisation, "jo@example.org").id
    accounts.set_role(user, tenant.project, "viewer")
    key = accounts.add_key(user, tenant.project, ())[1]
    assert tenant.call(key, ("GET", "limits"), None).status_code == 200
    accounts.set_role(user, tenant.project, None)
    unnamed, named = (tenant.call(key, ("GET", f"limits{query}"), None) for query in ("", "?project_id={project}"))
    assert (unnamed.status_code, unnamed.data) == (404, named.data)


@pytest.mark.parametrize("state", ["live", "called again", "unloaded", "unloaded at once", "deleted", "failed"])
def test_a_session_that_moves_brings_the_runs_that_count(tenant: Tenant, accounts: AccountService, state: str) -> None:
    target = accounts.add_project(tenant.organisation, "pans").id
    user = accounts.add_user(tenant.organisation, "jo@example.org").id
    for project in (tenant.project, target):
        accounts.set_role(user, project, "member")
    accounts.set_limits(target, {"live_models": 0})
    api = replace(tenant.api, key=accounts.add_key(user, tenant.project, SCOPES)[1])
    session = api.session()
    if state == "failed":
        asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
        model = api.post("create_model", asked).json["model_id"]
        api.commit(model, 0, Result(b'{"error": "no", "category": "user"}', failed=True))
    else:
        model = api.model(session)
    if state == "deleted":
        assert api.client.delete(f"/api/v1/training_runs/{model}", headers={"X-API-Key": api.key}).status_code == 200
    if state in ("unloaded", "unloaded at once", "called again"):
        api.post("unload_model", {"model_id": model})
    if state == "unloaded at once":  # in the millisecond of its last call
        records = api.services.records
        records.update("models", model, {"last_request": records.get("models", model)["unloaded"]})
    if state == "called again":
        time.sleep(0.01)  # the state server's clock counts milliseconds
        assert api.forward_backward(batch(model, 1)).status_code == 200
    used = api.get("limits").json["project"]["used"]["live_models"] - 1  # one exists already
    counts = state in ("live", "called again")
    assert used == counts
    path, headers = f"/api/v1/sessions/{session}/project", {"X-API-Key": api.key}
    moved = api.client.put(path, json={"project_id": target}, headers=headers)
    assert moved.status_code == (403 if counts else 200)


@pytest.mark.parametrize("full", ["live_models", "live_sessions", "storage_bytes"])
def test_a_session_moves_only_where_there_is_room_for_all_of_it(
    tenant: Tenant,
    accounts: AccountService,
    limit: Limit,
    full: str,
) -> None:
    target = accounts.add_project(tenant.organisation, "pans").id
    user = accounts.add_user(tenant.organisation, "jo@example.org").id
    for project in (tenant.project, target):
        accounts.set_role(user, project, "member")
    api = replace(tenant.api, key=accounts.add_key(user, tenant.project, SCOPES)[1])

    def move(to: str = target) -> int:
        path = f"/api/v1/sessions/{tenant.ids['session']}/project"
        headers = {"X-API-Key": api.key}
        return api.client.put(path, json={"project_id": to}, headers=headers).status_code

    accounts.set_limits(target, {full: 9 if full == "storage_bytes" else 0})
    assert move() == 403
    accounts.set_limits(target, {full: 10})
    api.services.quotas._limits._found.clear()
    assert move() == 200
    accounts.set_limits(target, {full: 0})
    api.services.quotas._limits._found.clear()
    assert move() == 200, "it is there"
    used = api.get(f"limits?project_id={target}").json["project"]["used"]
    assert (used["live_models"], used["storage_bytes"]) == (1, 10)
    accounts.set_limits(target, {full: None})
    accounts.set_limits(api.key.removeprefix("tml-").partition(".")[0], {full: 0, "requests_per_s": HOURS})
    api.services.quotas._limits._found.clear()
    assert move(tenant.project) == 200, "what its key has it had before"
    assert move() == 429, "each is a call of its key"
    assert move(tenant.project) == 429, "also where it is"

"""The audit log: every change of a persistent resource has one entry with its author. Some roles may read it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tinker.types import AuditLogEntry, AuditLogResponse

from app.domain.accounts import SCOPES
from app.domain.limits import Limits
from app.errors import BadRequest, Unavailable
from app.ids import TinkerPath
from app.services.tenants.audit import OPERATOR, AuditService
from tests.pages import age
from tests.servers import MAX_MEMORY
from tests.unit.app.api.test_billing import sweep
from tests.unit.app.api.test_copies import copy, project, saved
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api
from tests.unit.app.tenant import Tenant


def log(api: Api, query: str = "") -> AuditLogResponse:
    answer = api.get(f"audit{query}")
    assert answer.status_code == 200, answer.json
    return AuditLogResponse.model_validate(answer.json)


def own(api: Api, query: str = "") -> list[AuditLogEntry]:
    """Entries without the operator's own, such as the one for the new project."""
    return [entry for entry in log(api, query).entries if entry.event_details["user_id"] != OPERATOR]


def events(api: Api, query: str = "") -> list[str]:
    return [entry.event for entry in own(api, query)]


def checkpoint_calls(path: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    model, _, id_ = path.removeprefix("tinker://").partition("/")
    url = f"training_runs/{model}/checkpoints/{id_}"
    return [
        ("POST", f"{url}/publish", None),
        ("DELETE", f"{url}/publish", None),
        ("PUT", f"{url}/ttl", {"ttl_seconds": 3600}),
        ("DELETE", url, None),
        ("DELETE", f"training_runs/{model}", None),
    ]


def do(api: Api, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = api.client.open(f"/api/v1/{path}", method=method, json=body, headers={"X-API-Key": api.key})
    assert answer.status_code == 200, answer.json
    return answer.json


def test_what_is_done_to_a_run_and_its_checkpoints_is_logged_in_order(admin: Api) -> None:
    path = saved(admin)
    model = TinkerPath.parse(path).model_id
    caller = admin.services.authenticator(admin.key)
    project_id = caller.project
    do(admin, "POST", "save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    copied = do(admin, "POST", "copy_weights", {"source_path": path, "destination_project_id": project_id})[
        "tinker_path"
    ]
    for call in checkpoint_calls(path):
        do(admin, *call)
    entries = own(admin)
    assert [entry.event for entry in entries] == [
        "run_create",
        "checkpoint_save",
        "checkpoint_copy",
        "checkpoint_publish",
        "checkpoint_unpublish",
        "checkpoint_set_ttl",
        "checkpoint_delete",
        "run_delete",
    ]
    who = {"user_id": f"tml:organization_user:{caller.user}", "key_id": caller.key_id, "project_id": project_id}
    assert all(who.items() <= entry.event_details.items() for entry in entries)
    by_event = {entry.event: entry for entry in entries}
    assert by_event["checkpoint_set_ttl"].event_details["ttl_seconds"] == 3600
    for event in ("checkpoint_save", "checkpoint_publish", "checkpoint_delete"):
        assert (by_event[event].tinker_path, by_event[event].model_id) == (path, model)
    assert by_event["checkpoint_copy"].tinker_path == copied
    assert by_event["checkpoint_copy"].event_details["source_path"] == path
    assert by_event["run_create"].event_details["base_model"] == BASE
    now = datetime.fromtimestamp(admin.services.records.now(), UTC)
    assert all(timedelta() <= now - entry.timestamp < timedelta(minutes=1) for entry in entries)


def test_a_call_that_comes_again_is_logged_once_and_a_refused_one_not_at_all(admin: Api, stranger: Api) -> None:
    session = admin.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    model = admin.model(session)
    saving = {"model_id": model, "seq_id": 1, "path": "a"}
    for _ in range(3):
        do(admin, "POST", "create_model", body)
        do(admin, "POST", "save_weights", saving)
    assert admin.post("save_weights", {**saving, "seq_id": 2, "path": "../a"}).status_code == 400
    assert admin.post("create_model", {**body, "model_seq_id": 1, "base_model": "org/none"}).status_code == 400
    path = save_checkpoint(admin, model)
    for method, url, asked in checkpoint_calls(path):
        answer = stranger.client.open(f"/api/v1/{url}", method=method, json=asked, headers={"X-API-Key": stranger.key})
        assert answer.status_code == 404
    assert events(admin) == ["run_create", "checkpoint_save"]
    assert events(stranger) == []


def test_a_call_that_was_put_off_is_not_logged_and_a_repeat_with_other_content_is_logged_as_it_was_done(
    admin: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = {"model_id": admin.model(), "seq_id": 1, "path": "a"}
    with monkeypatch.context() as full:
        full.setattr(admin.services.quotas._limits, "_default", Limits(requests_per_s=0.0001))
        admin.services.quotas._limits._found.clear()
        assert admin.post("create_session", {}).status_code == 200, "which empties the bucket"
        assert admin.post("save_weights", saving).status_code == 429
    admin.services.quotas._limits._found.clear()
    do(admin, "POST", "save_weights", {**saving, "path": "b"})
    logged = [entry.tinker_path for entry in own(admin) if entry.event == "checkpoint_save"]
    assert [path.rpartition("/")[2] for path in logged if path] == ["b"]


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_a_run_that_is_deleted_again_and_again_has_one_entry(admin: Api, room: bool) -> None:
    model = admin.model()
    server = admin.services.oplog._redis
    try:
        if not room:
            server.config_set("maxmemory", server.info("memory")["used_memory"])
        for _ in range(3):
            do(admin, "DELETE", f"training_runs/{model}")
    finally:
        server.config_set("maxmemory", MAX_MEMORY)
    assert events(admin) == ["run_create", "run_delete"]


def test_a_move_is_logged_in_both_projects_and_a_move_to_where_the_session_is_in_none(tenant: Tenant) -> None:
    accounts, session, here = tenant.accounts, tenant.ids["session"], tenant.project
    there = accounts.add_project(tenant.organisation, "pans").id
    user = accounts.add_user(tenant.organisation, "jo@example.org").id
    for each in (here, there):
        accounts.set_role(user, each, "admin")
    api = replace(tenant.api, key=accounts.add_key(user, here, SCOPES)[1])
    for target in (here, there, there):
        do(api, "PUT", f"sessions/{session}/project", {"project_id": target})
    moves = [entry.event_details for entry in own(api) if entry.event == "session_move"]
    assert events(api, "?event_type=projects") == ["session_move"] * 2
    assert {move["project_id"] for move in moves} == {here, there}
    assert [(move["from_project_id"], move["to_project_id"]) for move in moves] == [(here, there)] * 2
    assert len(api.services.objects.list(f"moves/{session}/")) == 1, "the notes are never deleted"


def test_a_copy_made_anew_where_one_was_deleted_is_logged_again_and_its_deletion_too(admin: Api) -> None:
    source, target = saved(admin), {"destination_project_id": project(admin)}
    path = copy(admin, source, "once", **target).json["tinker_path"]
    for _ in range(2):
        assert copy(admin, source, "once", **target).json["tinker_path"] == path
    do(admin, *checkpoint_calls(path)[3])
    assert copy(admin, source, "once", **target).json["tinker_path"] == path
    do(admin, *checkpoint_calls(path)[3])
    assert events(admin) == ["run_create", *["checkpoint_copy", "checkpoint_delete"] * 2]


def test_what_makes_room_is_done_and_logged_when_there_is_none(admin: Api) -> None:
    calls = checkpoint_calls(save_checkpoint(admin, admin.model()))
    server = admin.services.oplog._redis
    server.config_set("maxmemory", server.info("memory")["used_memory"])
    try:
        assert (
            admin.client.open(f"/api/v1/{calls[0][1]}", method="POST", headers={"X-API-Key": admin.key}).status_code
            == 503
        )
        for call in calls[3:]:
            do(admin, *call)
    finally:
        server.config_set("maxmemory", MAX_MEMORY)
    assert events(admin) == ["run_create", "checkpoint_delete", "run_delete"]


def test_nothing_is_done_without_an_entry(admin: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = admin.model()
    path = save_checkpoint(admin, model)

    def no_room(*_: Any, **__: Any) -> None:
        raise Unavailable("no room")

    monkeypatch.setattr(type(admin.services.records), "note", no_room)
    before = admin.services.records.get("checkpoints", path)
    for method, url, asked in checkpoint_calls(path):
        answer = admin.client.open(f"/api/v1/{url}", method=method, json=asked, headers={"X-API-Key": admin.key})
        assert answer.status_code == 503
    assert admin.services.records.get("checkpoints", path) == before
    monkeypatch.undo()
    assert events(admin) == ["run_create"]
    do(admin, "POST", "save_weights", {"model_id": model, "seq_id": 1, "path": "b"})
    assert events(admin) == ["run_create", "checkpoint_save"], "in the step that takes it in"


def test_what_the_operator_changes_is_shown_to_the_admins_of_the_project(tenant: Tenant, api: Api) -> None:
    user = tenant.accounts.add_user(tenant.organisation, "jo@example.org").id
    tenant.accounts.set_role(user, tenant.project, "member")
    key, text = tenant.accounts.add_key(user, tenant.project, ["train"])
    tenant.accounts.set_limits(tenant.project, {"live_models": 3, "storage_bytes": None}, default=["weight"])
    tenant.accounts.set_limits(key.id, {"tokens_per_s": 9.5})
    with pytest.raises(BadRequest):
        tenant.accounts.set_limits(key.id, {"tokens_per_s": -1})
    do(replace(api, key=text), "DELETE", "auth/apikey/me")
    tenant.accounts.revoke(key.id)
    tenant.accounts.remove_user(user)
    entries = log(replace(api, key=tenant.key("admin"))).entries
    logged = [entry for entry in entries if entry.event_details.get("subject") == f"tml:organization_user:{user}"]
    assert [(entry.event, entry.event_details["user_id"]) for entry in logged] == [
        ("project_role_set", "operator"),
        ("key_create", "operator"),
        ("key_revoke", f"tml:organization_user:{user}"),
        ("key_revoke", "operator"),
        ("user_remove", "operator"),
    ]
    assert {entry.event_details.get("subject_key_id") for entry in logged[1:4]} == {key.id}
    assert entries[0].event == "project_create"
    limits = {e.event: e.event_details for e in entries if e.event.endswith("_limits_set")}
    changed = {"subject": tenant.project, "live_models": 3, "storage_bytes": None, "weight": "default"}
    assert changed.items() <= limits["project_limits_set"].items()
    assert {"subject": key.id, "tokens_per_s": 9.5, "user_id": "operator"}.items() <= limits["key_limits_set"].items()
    secret = text.partition(".")[2]
    assert secret not in str(entries)
    assert "jo@example.org" not in str(entries)


def test_what_concerns_an_organisation_is_kept_under_it_for_the_operator(tenant: Tenant, api: Api) -> None:
    audit: AuditService = api.services.audit
    today = datetime.fromtimestamp(api.services.records.now(), UTC).date()
    logged = [entry["event"] for entry in audit.of([tenant.organisation], "all", today)]
    assert logged[:3] == ["organization_create", "project_create", "user_create"]
    assert "organization_create" not in [entry.event for entry in log(replace(api, key=tenant.key("admin"))).entries]


def test_types_and_days_choose(admin: Api) -> None:
    path = save_checkpoint(admin, admin.model())
    for call in checkpoint_calls(path)[:2]:
        do(admin, *call)
    assert events(admin, "?event_type=checkpoints") == ["run_create", "checkpoint_publish", "checkpoint_unpublish"]
    assert events(admin, "?event_type=teams") == events(admin, "?event_type=organizations") == []
    assert [entry.event for entry in log(admin, "?event_type=teams").entries] == ["key_create"]
    today = datetime.fromtimestamp(admin.services.records.now(), UTC).date()
    assert len(events(admin, f"?event_type=all&day={today}")) == 3
    age(admin.services.oplog._redis, 24)
    assert events(admin) == []
    yesterday = f"?day={today - timedelta(days=1)}"
    caller, before = admin.services.authenticator(admin.key), log(admin, yesterday)
    assert len(own(admin, yesterday)) == 3
    sweep(admin)
    assert log(admin, yesterday) == before
    assert own(admin, "?day=0001-01-01") == own(admin, "?day=9999-12-31") == []
    for query in ("?event_type=x", "?day=today"):
        assert admin.get(f"audit{query}").status_code == 422
    admin.services.oplog._redis.flushall()
    kept = admin.services.audit.read(caller, "all", today - timedelta(days=1))
    assert AuditLogResponse.model_validate({"entries": kept}) == before, "they survive an emptied state server"

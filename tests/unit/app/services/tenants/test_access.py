"""Permissions of a caller, by his role in the resource's project."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import get_args

import pytest

from app.domain.accounts import Caller, Role
from app.domain.records import Session
from app.errors import Forbidden, NotFound
from app.services.tenants.access import check_role, load_owned, load_readable
from app.stores.redis.records import RedisRecords, dump
from tests.unit.app.conftest import BASE, Api

OURS, THEIRS = "ours", "theirs"
ROLES: tuple[Role, ...] = get_args(Role)


def caller(role: Role, project: str = OURS) -> Caller:
    """A caller who also has a project of his own."""
    return Caller("key", "user", "org", "own", {"own": "admin", project: role})


@pytest.fixture
def store(api: Api) -> RedisRecords:
    for project in (OURS, THEIRS):
        api.services.records.put(Session.namespace, project, dump(Session(project, 0.0)))
    return api.services.records


@pytest.mark.parametrize("load", [load_owned, load_readable])
def test_what_is_foreign_looks_missing_to_the_byte(store: RedisRecords, load) -> None:
    texts = []
    for name in (THEIRS, "absent"):
        with pytest.raises(NotFound) as error:
            load(store, Session, name, caller("admin"))
        texts.append(str(error.value).replace(name, "<id>"))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("role", ROLES)
def test_everybody_in_a_project_sees_what_is_in_it(store: RedisRecords, role: Role) -> None:
    assert load_readable(store, Session, OURS, caller(role)).owner == OURS


@pytest.mark.parametrize("needed", ROLES)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_what_the_ones_below_it_may(role: Role, needed: Role) -> None:
    if ROLES.index(role) >= ROLES.index(needed):
        check_role(caller(role), OURS, needed)
    else:
        with pytest.raises(Forbidden, match=f"this needs the role {needed} in project ours; your role is {role}"):
            check_role(caller(role), OURS, needed)


@pytest.mark.parametrize("role", ROLES)
def test_a_viewer_changes_nothing(store: RedisRecords, role: Role) -> None:
    with pytest.raises(Forbidden) if role == "viewer" else nullcontext():
        assert load_owned(store, Session, OURS, caller(role)).owner == OURS


def test_a_session_belongs_to_the_project_that_was_asked_for_or_to_the_callers_own(api: Api) -> None:
    asked = {"tags": [], "user_metadata": {}}
    for project in ("own", OURS):
        session = api.services.sessions.create(caller("member"), {**asked, "project_id": project})
        assert load_readable(api.services.records, Session, session, caller("member")).owner == project
    session = api.services.sessions.create(caller("member"), asked)
    assert load_readable(api.services.records, Session, session, caller("member")).owner == "own"


@pytest.mark.parametrize("project", [OURS, THEIRS, "absent"])
def test_a_project_where_one_may_open_no_session_looks_missing(api: Api, project: str) -> None:
    with pytest.raises(NotFound, match=f"^project '{project}' does not exist$"):
        api.services.sessions.create(caller("viewer"), {"tags": [], "user_metadata": {}, "project_id": project})
    assert list(api.services.records.list(Session.namespace)) == []


def test_what_is_made_in_a_session_is_of_its_project_whoever_makes_it(api: Api) -> None:
    own = api.services.records.get(Session.namespace, api.session())["owner"].strip('"')
    session = api.session()
    guest = caller("member", own)
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = api.services.sampling.create_session(guest, asked)
    assert api.get(f"samplers/{sampler}").status_code == 200, "who has the project sees it"


def test_a_viewers_wrong_call_uses_no_seq_up(api: Api) -> None:
    model = api.model()
    own = api.services.records.get("models", model)["owner"].strip('"')
    api.services.admission.refuse(model, 1, caller("viewer", own), "bad", "lost_batch")
    assert api.ops(model) == [0]
    api.services.admission.refuse(model, 1, caller("member", own), "bad", "lost_batch")
    assert api.ops(model) == [0, 1]


def test_a_viewer_follows_a_sample_and_does_not_stop_it(api: Api) -> None:
    sampler = api.sampler()
    own = api.services.records.get("samplers", sampler)["owner"].strip('"')
    asked = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    }
    request = api.post("asample", {**asked, "sampling_params": {}}).json["request_id"]
    with pytest.raises(Forbidden):
        api.services.cancels.cancel(request, caller("viewer", own))
    # A poll that waits looks the key up again, so it is a key that exists.
    viewer = replace(caller("viewer", own), key_id=own)
    assert api.services.polls.wait(request, viewer).state == "pending"
    api.services.cancels.cancel(request, caller("member", own))
    assert api.services.polls.wait(request, viewer).state == "failed"

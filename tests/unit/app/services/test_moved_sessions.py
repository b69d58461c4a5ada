"""A session moves to another project with all its resources, and stays there when the state server is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Sampler, Session
from app.domain.results import Result
from app.errors import BadRequest, Forbidden, NotFound
from app.services.recovery.rebuild import Rebuild
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from tests.unit.app.api.test_copies import saved
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api, batch


def owner(api: Api, namespace: str, key: str) -> str:
    return json.loads((api.services.records.get(namespace, key) or {})["owner"])


def caller(api: Api, session: str) -> Caller:
    """A caller in the session's project, and in another."""
    return Caller("key", "user", "org", "new", {owner(api, "sessions", session): "member", "new": "member"})


def test_all_that_is_in_it_goes_along_and_nothing_else(api: Api) -> None:
    session = api.session()
    run, other = api.model(session), api.model()
    path, elsewhere = save_checkpoint(api, run), save_checkpoint(api, other)
    sampler = f"{session}:sample:0"
    api.services.records.put("samplers", sampler, dump(Sampler(owner(api, "models", run), session, BASE, 0.0)))
    api.services.sessions.move(session, caller(api, session), "new")
    moved = [("sessions", session), ("models", run), ("samplers", sampler), ("checkpoints", path)]
    assert {owner(api, *which) for which in moved} == {"new"}
    assert owner(api, "models", other) == owner(api, "checkpoints", elsewhere) != "new"
    assert api.get(f"training_runs/{run}").status_code == 404, "who is not in the new project sees it no more"


def test_a_move_that_broke_off_is_completed_by_its_repeat(api: Api) -> None:
    session = api.session()
    run = api.model(session)
    mover = caller(api, session)
    api.services.records.update("sessions", session, {"owner": '"new"'})
    api.services.sessions.move(session, mover, "new")
    assert owner(api, "models", run) == "new"


def test_a_repeated_move_moves_nothing_back_from_where_it_was_moved_since(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have neither an entry in the audit log nor a note for a rebuild."""
    session = api.session()
    run, here, mover = api.model(session), owner(api, "sessions", session), caller(api, session)
    take = api.services.quotas.take

    def moved_meanwhile(*charged: Any) -> None:
        take(*charged)
        api.services.sessions.move(session, mover, "new")

    monkeypatch.setattr(api.services.quotas, "take", moved_meanwhile)
    api.services.sessions.move(session, mover, here)
    assert owner(api, "sessions", session) == owner(api, "models", run) == "new"


def test_what_is_being_saved_meanwhile_goes_along(api: Api) -> None:
    session = api.session()
    run = api.model(session)
    api.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    path = save_checkpoint(api, run)
    captured = api.services.records.get("checkpoints", path)
    assert captured is not None
    api.services.records.delete("checkpoints", path)
    api.services.sessions.move(session, caller(api, session), "new")
    api.commit(run, 1, Result(b"{}"), [("checkpoints", path, captured)])
    assert owner(api, "checkpoints", path) == "new"


def test_that_of_a_projects_openai_calls_stays(api: Api) -> None:
    """Its members' further calls would be made in it, and count for another project."""
    here = owner(api, "sessions", api.session())
    session = ids.openai_session_id(here)
    api.services.records.put("sessions", session, dump(Session(here, 0.0)))
    with pytest.raises(BadRequest, match="cannot be moved"):
        api.services.sessions.move(session, caller(api, session), "new")
    assert owner(api, "sessions", session) == here


def test_its_runs_go_on_in_the_new_project(api: Api) -> None:
    session = api.session()
    run = api.model(session)
    moved = caller(api, session)
    api.services.sessions.move(session, moved, "new")
    assert api.forward_backward(batch(run, 1)).status_code == 404
    asked = {"model_id": run, "seq_id": 1, "adam_params": {}}
    assert api.services.training.optim_step(Caller.alone("new"), asked)["request_id"] == f"{run}:1"


def test_it_is_moved_by_those_who_work_in_both_projects_alone(api: Api) -> None:
    session = api.session()
    here = owner(api, "sessions", session)
    for roles, refusal in (
        ({here: "viewer", "new": "member"}, Forbidden),
        ({here: "member", "new": "viewer"}, NotFound),
        ({here: "member"}, NotFound),
        ({"new": "member"}, NotFound),
    ):
        with pytest.raises(refusal):
            api.services.sessions.move(session, Caller("key", "user", "org", "x", roles), "new")
    assert owner(api, "sessions", session) == here


def test_a_rebuild_leaves_it_in_its_new_project(api: Api, state_url: str) -> None:
    path = saved(api)
    session = path.removeprefix("tinker://").partition(":train:")[0]
    first = owner(api, "sessions", session)
    there_and_back = Caller("key", "user", "org", "new", {first: "member", "new": "member"})
    for project in ("new", first, "new"):
        api.services.sessions.move(session, there_and_back, project)
    for foreign in ("moves/Thumbs.db", f"moves/{session}/Thumbs.db"):
        api.services.objects.put_new(foreign, b"x")
    with connect(state_url) as client:
        client.flushall()
        lifecycle = RedisLifecycle(client, api.services.settings.engine)
        Rebuild(api.services.oplog, lifecycle, api.services.records, api.services.objects)()
    assert owner(api, "checkpoints", path) == owner(api, "sessions", session) == "new"

"""Runs, checkpoints and sessions in pages: the newest first, only the caller's own, with their total."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis
from tinker.types.checkpoints_list_response import CheckpointsListResponse
from tinker.types.get_session_response import GetSessionResponse
from tinker.types.list_sessions_response import ListSessionsResponse
from tinker.types.training_runs_response import TrainingRunsResponse

from app.domain.accounts import SCOPES, Caller
from app.ids import TinkerPath
from app.services.tenants.accounts import AccountService
from app.settings import EngineSettings
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from tests.unit.app.api.test_copies import copy, project, saved
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api
from tests.unit.app.stores.redis.lists import calls
from tests.unit.app.tenant import Tenant


def aged(api: Api, namespace: str, ids: list[str]) -> list[str]:
    """Created one second after another; the newest first."""
    for second, id_ in enumerate(ids):
        api.services.records.put(namespace, id_, {"created": str(1000.0 + second)})
    return ids[::-1]


def test_runs_come_newest_first_a_page_at_a_time(api: Api, stranger: Api) -> None:
    stranger.model()
    runs = aged(api, "models", [api.model() for _ in range(3)])
    pages = [
        TrainingRunsResponse.model_validate(api.get(f"training_runs?limit=2&offset={offset}").json) for offset in (0, 2)
    ]
    assert [run.training_run_id for page in pages for run in page.training_runs] == runs
    assert [page.cursor.model_dump() for page in pages] == [
        {"offset": offset, "limit": 2, "total_count": 3} for offset in (0, 2)
    ]


def test_a_listed_run_is_what_it_is_when_asked_for_alone(api: Api) -> None:
    model = api.model(user_metadata={"renderer_name": "qwen3"})
    save_checkpoint(api, model)
    listed = api.get("training_runs").json["training_runs"]
    assert listed == [api.get(f"training_runs/{model}").json]
    assert listed[0]["last_checkpoint"]["checkpoint_id"] == "weights/a"


def test_a_runs_owner_is_the_user_who_made_it(tenant: Tenant) -> None:
    """Programs compare `model_owner` with `user_urn` of `whoami`."""
    one, other = (replace(tenant.api, key=tenant.key(role)) for role in ("member", "viewer"))
    user = one.services.authenticator(one.key).user
    made = one.model()
    copied = copy(one, saved(one, made), destination_project_id=tenant.project).json["tinker_path"]
    for run in (made, TinkerPath.parse(copied).model_id):
        seen = other.get(f"training_runs/{run}?access_scope=accessible").json
        assert (seen["model_owner"], seen["project_id"]) == (f"tml:organization_user:{user}", tenant.project)


def test_a_run_of_an_unknown_user_is_its_projects(tenant: Tenant) -> None:
    one = replace(tenant.api, key=tenant.key("member"))
    run = one.model()
    one.services.records.put("models", run, {"user": '""'})
    assert one.get(f"training_runs/{run}").json["model_owner"] == tenant.project


def test_a_checkpoint_names_its_base_model_wherever_it_is_listed(api: Api) -> None:
    model = api.model()
    save_checkpoint(api, model)
    run = api.get(f"training_runs/{model}").json
    listed = [
        *api.get("checkpoints").json["checkpoints"],
        *api.get(f"training_runs/{model}/checkpoints").json["checkpoints"],
        run["last_checkpoint"],
    ]
    assert [one.get("base_model") for one in listed] == [BASE] * 3


def test_runs_of_a_project_alone_and_none_of_one_that_is_not_seen(
    tenant: Tenant, accounts: AccountService, stranger: Api
) -> None:
    project, other = tenant.project, accounts.add_project(tenant.organisation, "pans").id
    user = accounts.add_user(tenant.organisation, "jo@example.org").id
    for each in (project, other):
        accounts.set_role(user, each, "member")
    api = replace(tenant.api, key=accounts.add_key(user, other, SCOPES)[1])
    runs = {project: tenant.ids["model"], other: api.model()}

    def listed(query: str = "") -> set[str]:
        return {run["training_run_id"] for run in api.get(f"training_runs{query}").json["training_runs"]}

    assert listed() == set(runs.values())
    assert {id_: listed(f"?project_id={id_}") for id_ in runs} == {id_: {run} for id_, run in runs.items()}
    foreign = stranger.get(f"training_runs?project_id={project}")
    missing = stranger.get("training_runs?project_id=no-such-project")
    assert (foreign.status_code, missing.status_code) == (404, 404)
    assert foreign.data.replace(project.encode(), b"no-such-project") == missing.data


def test_checkpoints_of_all_runs_come_newest_first_and_without_those_that_expired(api: Api, stranger: Api) -> None:
    save_checkpoint(stranger, stranger.model())
    paths = [save_checkpoint(api, api.model(), created=float(n), user_metadata={"step": str(n)}) for n in (1, 3, 2)]
    save_checkpoint(api, api.model(), expires_at=1.0)
    first = CheckpointsListResponse.model_validate(api.get("checkpoints?limit=2").json)
    assert [found.tinker_path for found in first.checkpoints] == [paths[1], paths[2]]
    assert first.checkpoints[0].user_metadata == {"step": "3"}
    assert first.cursor is not None
    assert first.cursor.total_count == 3
    rest = api.get("checkpoints?limit=2&offset=2").json["checkpoints"]
    assert [found["tinker_path"] for found in rest] == [paths[0]]


def test_a_list_of_checkpoints_costs_the_same_however_many_others_there_are(
    api: Api, stranger: Api, state_url: str
) -> None:
    model = api.model()
    save_checkpoint(api, model)
    theirs = stranger.model()
    routes = ("checkpoints", f"training_runs/{model}/checkpoints")

    with connect(state_url) as client:

        def commands(route: str) -> int:
            """The fewest of three tries: the server loads a script at its first use, and threads of the API subscribe
            to channels meanwhile."""
            counts = []
            for _ in range(3):
                before = calls(client)
                assert len(api.get(route).json["checkpoints"]) == 1
                counts.append(calls(client) - before)
            return min(counts)

        alone = [commands(route) for route in routes]
        found = api.services.records.get("checkpoints", save_checkpoint(stranger, theirs))
        assert found is not None
        for name in range(1000):
            api.services.records.put("checkpoints", f"tinker://{theirs}/weights/{name}", found)
        assert [commands(route) for route in routes] == alone


def test_the_lists_of_all_runs_and_of_each_run_agree(api: Api, stranger: Api, state_url: str) -> None:
    """About copies, ended runs, moved sessions, published, expired and deleted checkpoints."""
    source, ended, moved = saved(api), api.model(), api.model()
    for run in (ended, moved):
        save_checkpoint(api, run)
    save_checkpoint(api, ended, "sampler_weights")
    save_checkpoint(api, ended, "external_weights", expires_at=1.0)
    foreign = save_checkpoint(stranger, stranger.model(), public=True)
    copied = copy(api, source).json["tinker_path"]
    api.services.models.delete(ended, Caller.alone(project(api)))
    api.services.records.delete("checkpoints", source)
    with connect(state_url) as client:
        RedisLifecycle(client, EngineSettings()).move(moved.partition(":")[0], "elsewhere")

    listed = api.get("checkpoints").json["checkpoints"]
    assert listed == checkpoints_of(api, run_of(copied)) + checkpoints_of(api, ended)
    assert len(listed) == 3
    assert checkpoints_of(api, run_of(source)) == []
    assert api.get(f"training_runs/{moved}/checkpoints").status_code == 404
    assert [one["tinker_path"] for one in checkpoints_of(api, run_of(foreign))] == [foreign]


def run_of(path: str) -> str:
    return TinkerPath.parse(path).model_id


def checkpoints_of(api: Api, run: str) -> list[dict[str, object]]:
    return list(api.get(f"training_runs/{run}/checkpoints").json["checkpoints"])


def test_sessions_come_newest_first_and_say_what_is_in_them(api: Api, stranger: Api) -> None:
    stranger.session()
    sessions = aged(api, "sessions", [api.session() for _ in range(3)])
    assert ListSessionsResponse.model_validate(api.get("sessions?limit=2").json).sessions == sessions[:2]
    assert api.get("sessions?offset=2").json["sessions"] == sessions[2:]
    asked = {"user_metadata": {"n": 1}, "display_name": "nightly"}
    session = api.post("create_session", asked).json["session_id"]
    model = api.model(session)
    found = GetSessionResponse.model_validate(api.get(f"sessions/{session}").json)
    assert (found.training_run_ids, found.sampler_ids) == ([model], [])
    assert (found.user_metadata, found.display_name) == ({"n": "1"}, "nightly")


def test_the_runs_of_a_session_come_newest_first(api: Api) -> None:
    session = api.session()
    runs = [api.model(session, model_seq_id=number) for number in range(12)]
    assert api.get(f"sessions/{session}").json["training_run_ids"] == runs[::-1]


def test_another_ones_session_looks_missing(api: Api, stranger: Api) -> None:
    session = api.session()
    for tail in ("", "/trace_export"):
        foreign = stranger.get(f"sessions/{session}{tail}")
        missing = stranger.get(f"sessions/{'0' * len(session)}{tail}")
        assert foreign.status_code == missing.status_code == 404
        assert foreign.data.replace(session.encode(), b"0" * len(session)) == missing.data


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=many", "offset=-1", "offset=1e3"])
@pytest.mark.parametrize("path", ["training_runs", "checkpoints", "sessions"])
def test_a_page_that_cannot_be_is_refused_by_value(api: Api, path: str, query: str) -> None:
    answer = api.get(f"{path}?{query}")
    assert answer.status_code == 422
    assert query.partition("=")[2] in answer.json["detail"]


@pytest.fixture
def state(state_url: str) -> Iterator[redis.Redis]:
    with connect(state_url) as client:
        yield client


def test_a_list_of_runs_and_a_session_read_nothing_of_other_runs(api: Api, stranger: Api, state: redis.Redis) -> None:
    """Counts the records that are read, beside few and beside many runs of others."""
    session = api.session()
    model = api.model(session)

    def reads() -> int:
        state.config_resetstat()
        assert [run["training_run_id"] for run in api.get("training_runs").json["training_runs"]] == [model]
        assert api.get(f"sessions/{session}").json["training_run_ids"] == [model]
        return int(state.info("commandstats")["cmdstat_hgetall"]["calls"])

    alone = reads()
    for _ in range(5):
        stranger.model()
    assert reads() == alone


def test_a_run_that_a_process_of_an_earlier_version_moved_is_not_shown_any_more(api: Api, state: redis.Redis) -> None:
    session = api.session()
    model = api.model(session)
    state.hset(f"tinsmith:models:{model}", "owner", '"other"')
    assert api.get("training_runs").json["training_runs"] == []

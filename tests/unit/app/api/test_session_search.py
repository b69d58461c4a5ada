"""Sessions are found by their metadata, one page at a time, and only by their owner."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tinker.types.session_search_response import SessionSearchResponse

from app.api.sessions import SearchSessions
from app.domain.accounts import Caller
from app.domain.records import Session
from app.stores.redis.records import RedisRecords
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import Api
from tests.unit.app.tenant import Tenant


def search(api: Api, **asked: Any) -> SessionSearchResponse:
    answer = api.post("sessions/search", asked)
    assert answer.status_code == 200, answer.json
    return SessionSearchResponse.model_validate(answer.json)


def found(api: Api, **asked: Any) -> set[str]:
    return {session.session_id for session in search(api, **asked).sessions}


def urn(api: Api) -> str:
    """The caller's name in the SDK's form, as `whoami` and the usage have it."""
    return f"tml:organization_user:{api.services.authenticator(api.key).user}"


def of(*owners: str) -> dict[str, Any]:
    """A search for sessions of these owners."""
    return {"owner": {"type": "user", "owner_urns": list(owners)}}


@pytest.fixture
def sessions(api: Api) -> dict[str, str]:
    """Sessions by name: one active, one finished by its client, one long without a heartbeat."""
    made = {}
    for name in ("Nightly SFT", "nightly RL", "debug"):
        metadata = {"team": name.split()[0].lower(), "lr": 0.1}
        body = {"display_name": name, "user_metadata": metadata}
        made[name] = api.post("create_session", body).json["session_id"]
    api.post(f"sessions/{made['nightly RL']}/finish", {"reason": {"type": "errored"}})
    api.services.records.put("sessions", made["debug"], {"status": '"expired"'})
    return made


def test_a_summary_says_what_a_session_is_and_what_it_stores(api: Api, sessions: dict[str, str]) -> None:
    save_checkpoint(api, api.model(sessions["nightly RL"]))
    [summary] = search(api, session_id=sessions["nightly RL"]).sessions
    assert (summary.checkpoints_count, summary.checkpoint_storage_bytes) == (1, 10)
    assert (summary.display_name, summary.user_metadata) == ("nightly RL", {"team": "nightly", "lr": "0.1"})
    assert summary.status is not None
    assert summary.status.model_dump()["reason"] == {"type": "errored"}
    assert summary.owner == urn(api)


def test_the_detail_of_the_first_finish_is_found_at_bounded_length(api: Api) -> None:
    def finish(session: str, reason: str, detail: str | None) -> Any:
        api.post(f"sessions/{session}/finish", {"reason": {"type": reason}, "detail": detail})
        return search(api, session_id=session).sessions[0].status.model_dump()

    session = api.session()
    failed = {"type": "client_finished", "reason": {"type": "errored"}, "detail": "OOM at step 3 \N{SNOWMAN}"}
    assert finish(session, "errored", failed["detail"]) == failed
    assert finish(session, "success", "all is well") == failed
    assert finish(api.session(), "errored", "x" * 10_000)["detail"] == "x" * 4096
    assert finish(api.session(), "success", None)["detail"] is None


FILTERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, {"Nightly SFT", "nightly RL", "debug"}),
    "words of the name": ({"display_name": "rl NIGHT"}, {"nightly RL"}),
    "metadata": ({"user_metadata": {"team": "nightly", "lr": "0.1"}}, {"Nightly SFT", "nightly RL"}),
    "metadata that differs": ({"user_metadata": {"team": "nightly", "lr": "0.2"}}, set()),
    "active": ({"statuses": [{"type": "active"}]}, {"Nightly SFT"}),
    "finished": ({"statuses": [{"type": "client_finished"}]}, {"nightly RL"}),
    "finished otherwise": ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, set()),
    "either": ({"statuses": [{"type": "active"}, {"type": "client_finished"}]}, {"Nightly SFT", "nightly RL"}),
    "failed, which none ever is": ({"statuses": [{"type": "failed"}]}, set()),
    "another user's": ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, set()),
    "accessible": ({"owner": {"type": "accessible"}}, {"Nightly SFT", "nightly RL", "debug"}),
}


@pytest.mark.parametrize("case", FILTERS)
def test_a_filter_finds_what_fits(api: Api, sessions: dict[str, str], case: str) -> None:
    asked, names = FILTERS[case]
    assert found(api, **asked) == {sessions[name] for name in names}


def test_an_id_or_a_name_is_enough(api: Api, sessions: dict[str, str]) -> None:
    both = found(api, session_id=sessions["debug"], display_name="sft")
    assert both == {sessions["debug"], sessions["Nightly SFT"]}


def test_pages_follow_each_other_to_the_last_and_no_session_comes_twice(api: Api) -> None:
    for n in range(5):
        session = api.session()
        # Two of them were made in the same microsecond.
        api.services.records.put("sessions", session, {"created": str(1000.000001 + n // 2)})
    seen, cursor = [], None
    for _ in range(3):
        page = search(api, limit=2, **({"cursor": cursor} if cursor else {}))
        seen += [(session.created_at, session.session_id) for session in page.sessions]
        cursor = page.next_cursor and page.next_cursor.model_dump(mode="json")
    assert cursor is None
    assert seen == sorted(set(seen), reverse=True)
    assert len(seen) == 5


def test_a_session_that_goes_while_the_others_are_read_is_left_out(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = api.session(), api.session()
    records, listing = api.services.records, RedisRecords.list_sessions

    def list_and_remove(self: RedisRecords, projects: Collection[str]) -> Sequence[tuple[float, str]]:
        listed = listing(self, projects)
        records.delete(Session.namespace, gone)
        assert gone in {id_ for _, id_ in listed}
        return listed

    monkeypatch.setattr(RedisRecords, "list_sessions", list_and_remove)
    assert found(api) == {kept}


def test_a_stranger_finds_nothing_and_names_no_project_of_others(api: Api, stranger: Api) -> None:
    session = api.session()
    project = search(api).sessions[0].project_id
    assert found(stranger) == found(stranger, session_id=session) == set()
    assert found(stranger, owner={"type": "accessible"}) == set()
    assert stranger.post("sessions/search", {"project_ids": [project]}).status_code == 404
    assert found(api, project_ids=[project]) == {session}


@pytest.mark.parametrize("known", [True, False])
def test_where_one_only_looks_is_accessible_and_not_ones_own(api: Api, known: bool) -> None:
    """The viewer opened the session as a member, or nobody knows who did."""
    session = api.session()
    project = search(api).sessions[0].project_id
    records = api.services.records
    opened = records.find(Session, session)
    assert opened is not None and opened.user
    if not known:
        records.put(Session.namespace, session, {"user": json.dumps("")})
    viewer = Caller("key", opened.user, "org", "mine", {"mine": "admin", project: "viewer"})

    def ids(**asked: Any) -> list[str]:
        result = api.services.session_search(viewer, SearchSessions().load(asked))
        return [one["session_id"] for one in result["sessions"]]

    assert (ids(), ids(owner={"type": "accessible"})) == ([], [session])


@pytest.fixture
def colleagues(tenant: Tenant) -> tuple[Api, Api]:
    """Two members of one project."""
    one, other = (replace(tenant.api, key=tenant.key("member")) for _ in range(2))
    return one, other


def test_a_search_by_a_users_urn_finds_that_users_sessions_alone(colleagues: tuple[Api, Api]) -> None:
    one, other = colleagues
    theirs, ours = one.session(), other.session()
    assert found(other, **of(urn(one))) == found(one, **of(urn(one))) == {theirs}
    assert found(one, **of(urn(one), urn(other))) == {theirs, ours}
    assert found(one, **of(urn(other)), project_ids=[]) == set()


def test_a_search_by_a_users_earlier_urn_finds_the_same_sessions(colleagues: tuple[Api, Api]) -> None:
    one, other = colleagues
    theirs, _ = one.session(), other.session()
    assert found(other, **of(urn(one).replace("organization_user", "user"))) == {theirs}


def test_a_search_by_a_projects_id_finds_everybodys_sessions_in_it(colleagues: tuple[Api, Api], tenant: Tenant) -> None:
    one, other = colleagues
    made = {one.session(), other.session(), tenant.ids["session"], tenant.ids["sampler"].partition(":")[0]}
    assert found(one, **of(tenant.project)) == made


def test_a_users_urn_finds_no_session_where_the_caller_sees_nothing(colleagues: tuple[Api, Api], stranger: Api) -> None:
    session = colleagues[0].session()
    assert found(stranger, **of(urn(colleagues[0]))) == set()
    assert found(colleagues[0], **of(urn(colleagues[0]))) == {session}


def test_a_colleagues_sessions_are_accessible_and_not_ones_own(colleagues: tuple[Api, Api]) -> None:
    one, other = colleagues
    theirs, ours = one.session(), other.session()
    assert found(other) == {ours}
    assert {theirs, ours} <= found(other, owner={"type": "accessible"})


def test_a_session_of_no_known_user_is_its_projects_and_everybodys_own(
    colleagues: tuple[Api, Api], tenant: Tenant
) -> None:
    one, other = colleagues
    shared = one.session()
    one.services.records.put("sessions", shared, {"user": '""'})
    [summary] = search(other).sessions
    assert (summary.session_id, summary.owner) == (shared, tenant.project)
    assert found(other, **of(urn(one), "tml:organization_user:", "tml:user:")) == set()
    assert shared in found(other, **of(tenant.project))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"limit": 0}, "limit"),
    ({"limit": 201}, "limit"),
    ({"owner": {"type": "all"}}, "all"),
    ({"display_name": ""}, "display_name"),
    ({"display_name": "a " * 300}, "display_name"),
    ({"statuses": [{"type": "active"}] * 17}, "statuses"),
    ({"statuses": [{"type": "lost"}]}, "lost"),
    ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "last_created_at"),
]


@pytest.mark.parametrize(("asked", "named"), BAD)
def test_a_search_that_cannot_be_is_refused_by_value(api: Api, asked: dict[str, Any], named: str) -> None:
    answer = api.post("sessions/search", asked)
    assert (answer.status_code, named in answer.json["detail"]) == (422, True)

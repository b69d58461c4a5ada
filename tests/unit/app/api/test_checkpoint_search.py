"""Checkpoints are found by project, metadata, type and base model, one page at a time, and only by who may see them."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from app.domain.records import Checkpoint
from app.services.tenants import access
from app.stores.redis.records import dump
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.api.test_session_search import of, urn
from tests.unit.app.conftest import BASE, Api
from tests.unit.app.tenant import Tenant


def search(api: Api, **asked: Any) -> dict[str, Any]:
    answer = api.post("checkpoints/search", asked)
    assert answer.status_code == 200, answer.json
    found: dict[str, Any] = answer.json
    return found


def found(api: Api, **asked: Any) -> list[str]:
    return [one["tinker_path"] for one in search(api, **asked)["checkpoints"]]


@pytest.fixture
def paths(api: Api) -> dict[str, str]:
    """Checkpoints by name, the newest last."""
    model = api.model()
    return {
        "weights": save_checkpoint(api, model, user_metadata={"step": "7", "team": "a"}),
        "sampler": save_checkpoint(
            api, model, "sampler_weights", created=2.0, user_metadata={"step": "8", "team": "a"}
        ),
        "external": save_checkpoint(api, model, "external_weights", created=3.0, base_model="org/else"),
    }


FILTERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, ["external", "sampler", "weights"]),
    "nulls": ({"project_ids": None, "cursor": None, "checkpoint_type": None}, ["external", "sampler", "weights"]),
    "a type": ({"checkpoint_type": "training"}, ["weights"]),
    "another type": ({"checkpoint_type": "external"}, ["external"]),
    "metadata": ({"user_metadata": {"team": "a"}}, ["sampler", "weights"]),
    "pairs that all hold": ({"user_metadata": {"team": "a", "step": "7"}}, ["weights"]),
    "a pair that differs": ({"user_metadata": {"team": "a", "step": "9"}}, []),
    "a base model": ({"base_models": [BASE]}, ["sampler", "weights"]),
    "base models": ({"base_models": [BASE, "org/else"]}, ["external", "sampler", "weights"]),
    "no base model": ({"base_models": []}, []),
    "no project": ({"project_ids": []}, []),
    "another user's": ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
    "accessible": ({"owner": {"type": "accessible"}}, ["external", "sampler", "weights"]),
    "newest alone": ({"limit": 1}, ["external"]),
}


@pytest.mark.parametrize("case", FILTERS)
def test_a_filter_finds_what_fits_newest_first(api: Api, paths: dict[str, str], case: str) -> None:
    asked, names = FILTERS[case]
    assert found(api, **asked) == [paths[name] for name in names]


def test_a_checkpoint_is_described_as_in_the_other_lists(api: Api, paths: dict[str, str]) -> None:
    assert search(api)["checkpoints"] == api.get("checkpoints").json["checkpoints"]
    assert search(api)["checkpoints"][0]["base_model"] == "org/else"


def test_pages_follow_each_other_to_the_last_and_no_checkpoint_comes_twice(api: Api) -> None:
    model, owner = api.model(), None
    path = save_checkpoint(api, model)
    owner = api.services.records.get("checkpoints", path)["owner"].strip('"')
    for n in range(6):
        # Two of them were made in the same microsecond.
        record = Checkpoint(owner, model, "weights", BASE, "x", 1000.000001 + n // 2, 1, {}, [])
        api.services.records.put("checkpoints", f"tinker://{model}/weights/n{n}", dump(record))
    seen, cursor = [], None
    while True:
        page = search(api, limit=2, cursor=cursor)
        seen += [one["tinker_path"] for one in page["checkpoints"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            break
        assert str(uuid.UUID(cursor["last_checkpoint_uuid"])) == cursor["last_checkpoint_uuid"]
    assert len(seen) == len(set(seen)) == 7
    assert seen == found(api)


def test_an_expired_checkpoint_is_not_found(api: Api) -> None:
    save_checkpoint(api, api.model(), expires_at=1.0)
    assert found(api) == []


def test_checkpoints_of_others_are_not_found_public_or_not(api: Api, stranger: Api, paths: dict[str, str]) -> None:
    api.services.records.update("checkpoints", paths["weights"], {"public": "true"})
    assert found(stranger) == found(stranger, owner={"type": "accessible"}) == []
    owner = api.services.records.get("checkpoints", paths["weights"])["owner"].strip('"')
    foreign, missing = (stranger.post("checkpoints/search", {"project_ids": [id_]}) for id_ in (owner, "0" * 16))
    assert foreign.status_code == missing.status_code == 404
    assert foreign.data.replace(owner.encode(), b"0" * 16) == missing.data


def test_a_viewer_finds_them_among_the_accessible_alone(tenant: Tenant) -> None:
    viewer = Api(tenant.api.client, tenant.api.services, tenant.key("viewer"))
    assert found(viewer) == []
    assert found(viewer, owner={"type": "accessible"}, project_ids=[tenant.project]) == [tenant.ids["path"]]


def test_a_search_by_a_users_urn_finds_the_checkpoints_of_that_users_sessions_alone(tenant: Tenant) -> None:
    one, other = (replace(tenant.api, key=tenant.key("member")) for _ in range(2))
    theirs, ours = (save_checkpoint(each, each.model(), created=2.0 + n) for n, each in enumerate((one, other)))
    assert found(other, **of(urn(one))) == found(one, **of(urn(one))) == [theirs]
    assert found(one, **of(urn(one), urn(other))) == [ours, theirs]
    assert found(one, **of(tenant.project)) == [ours, theirs, tenant.ids["path"]]


def test_a_colleagues_checkpoints_are_accessible_and_not_ones_own(tenant: Tenant) -> None:
    one = replace(tenant.api, key=tenant.key("member"))
    ours = save_checkpoint(one, one.model(), created=2.0)
    assert found(one) == [ours]
    assert found(one, owner={"type": "accessible"}) == [ours, tenant.ids["path"]]


def test_a_search_by_owner_reads_many_sessions_at_once_and_no_more_than_its_page_needs(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reads = api.services.authenticator(api.key).project, []
    monkeypatch.setattr(access, "_SLICE", 100)
    for n in range(120):
        model = f"s{max(n, 29)}:train:0"  # the oldest 30 are of one session, which a slice cuts
        record = Checkpoint(owner, model, "weights", BASE, "x", float(n), 1, {}, [])
        api.services.records.put("checkpoints", f"tinker://{model}/weights/{n}", dump(record))
    read = type(api.services.records).read

    def counted(records: Any, namespace: str, ids: Any) -> Any:
        reads.extend([len(ids)] if namespace == "sessions" else [])
        return read(records, namespace, ids)

    monkeypatch.setattr(type(api.services.records), "read", counted)
    assert len(found(api, limit=5)) == 5
    assert reads == [91]
    assert len(found(api, limit=110)) == 110
    assert reads == [91, 91, 0], "no session is read twice"
    assert len(found(api, limit=110, owner={"type": "accessible"})) == 110
    assert reads == [91, 91, 0], "who sees all needs no session"


def test_a_search_reads_few_whole_records_and_passes_over_one_that_is_deleted_meanwhile(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_SLICE", 2)
    records, reads = api.services.records, list[str]()
    paths = [save_checkpoint(api, api.model(), created=9.0 - n) for n in range(9)]
    read = type(records).read

    def read_late(self: Any, namespace: str, ids: Any) -> Any:
        records.delete("checkpoints", paths[1])
        reads.extend(ids if namespace == "checkpoints" else [])
        return read(self, namespace, ids)

    monkeypatch.setattr(type(records), "read", read_late)
    answer = api.post("checkpoints/search", {"limit": 2}).json
    assert [one["tinker_path"] for one in answer["checkpoints"]] == [paths[0], paths[2]]
    assert "next_cursor" in answer, "more follow"
    assert reads == paths[:4]


def test_a_checkpoint_that_moves_to_another_project_meanwhile_is_not_shown(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = api.services.records
    paths = [save_checkpoint(api, api.model(), created=9.0 - n) for n in range(3)]
    read = type(records).read

    def read_late(self: Any, namespace: str, ids: Any) -> Any:
        records.update("checkpoints", paths[1], {"owner": '"theirs"'})
        return read(self, namespace, ids)

    for shown in (lambda: search(api), lambda: api.get("checkpoints").json):
        records.update("checkpoints", paths[1], {"owner": f'"{api.services.authenticator(api.key).project}"'})
        with monkeypatch.context() as patch:
            patch.setattr(type(records), "read", read_late)
            assert [one["tinker_path"] for one in shown()["checkpoints"]] == [paths[0], paths[2]]


def test_a_checkpoint_that_is_saved_again_meanwhile_does_not_bring_the_next_page_back_to_the_first(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = api.services.records
    paths = [save_checkpoint(api, api.model(), created=9.0 - n) for n in range(4)]
    read = type(records).read

    def read_late(self: Any, namespace: str, ids: Any) -> Any:
        records.update("checkpoints", paths[1], {"created": "100.0"})
        return read(self, namespace, ids)

    with monkeypatch.context() as patch:
        patch.setattr(type(records), "read", read_late)
        first = search(api, limit=2)
    assert [one["tinker_path"] for one in first["checkpoints"]] == paths[:2]
    assert found(api, limit=2, cursor=first["next_cursor"]) == paths[2:]


def test_only_the_checkpoints_of_the_searched_projects_are_read(
    api: Api, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(api.services.records), "list", lambda *_: pytest.fail("all checkpoints were read"))
    assert len(found(api)) == 3


BAD: dict[str, dict[str, Any]] = {
    "limit": {"limit": 201},
    "limit of 0": {"limit": 0},
    "checkpoint_type": {"checkpoint_type": "weights"},
    "cursor": {"cursor": {"last_created_at": "yesterday", "last_checkpoint_uuid": "x"}},
    "user_metadata": {"user_metadata": {"step": 7}},
    "owner": {"owner": {"type": "everybody"}},
    "base_models": {"base_models": "org/tiny"},
}


@pytest.mark.parametrize("case", BAD)
def test_a_search_of_another_form_is_refused_by_the_name_of_the_field(api: Api, case: str) -> None:
    answer = api.post("checkpoints/search", BAD[case])
    assert (answer.status_code, next(iter(BAD[case])) in answer.json["detail"]) == (422, True)

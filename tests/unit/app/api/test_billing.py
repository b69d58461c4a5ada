"""Usage and storage at the API: the SDK's methods for administrators, and their permissions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tinker.types import BillingUsageResponse, CurrentCheckpointStorageUsageResponse

from app.domain.results import Result, Usage
from app.stores.pages import PageFiles
from app.stores.redis.pages import RedisPages
from app.stores.redis.types import Lease
from tests.pages import age
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.conftest import BASE, Api, batch
from tests.unit.app.tenant import Tenant
from workers.maintenance.accounting import Accounting

HOUR = timedelta(hours=1)


def this_hour(api: Api) -> datetime:
    return datetime.fromtimestamp(api.services.records.now() // 3600 * 3600, UTC)


def window(start: datetime, hours: float = 1) -> str:
    end = start + hours * HOUR
    return f"billing/usage/events?starting_on={start:%Y-%m-%dT%H:%M:%SZ}&ending_before={end:%Y-%m-%dT%H:%M:%SZ}"


def train(api: Api, model: str, usage: Usage, seq: int = 1) -> None:
    """Commits a batch of this model with this usage."""
    assert api.forward_backward(batch(model, seq)).status_code == 200
    lease = api.services.oplog.acquire(model, "node/test")
    assert isinstance(lease, Lease)
    api.services.oplog.commit(lease, seq, Result(b"{}"), usage=usage)


def sweep(api: Api) -> None:
    pages = RedisPages(api.services.oplog._redis, api.services.settings.engine)
    Accounting(pages, PageFiles(api.services.objects), api.services.records).sweep()


def events(api: Api, path: str) -> BillingUsageResponse:
    answer = api.get(path)
    assert answer.status_code == 200, answer.json
    return BillingUsageResponse.model_validate(answer.json)


def test_each_kind_of_usage_is_what_the_sdk_has_for_it(admin: Api) -> None:
    amounts = {"training": 6, "sampling_prefill": 5, "sampling_prefill_cached": 4, "sampling_sample": 7}
    session = admin.post("create_session", {"user_metadata": {"team": "a", "n": 3}}).json["session_id"]
    model, now = admin.model(session), this_hour(admin)
    train(admin, model, {**amounts, "checkpoint": 2, "storage": 36 * 10**11})
    answer = events(admin, window(now))
    infos = [event.event_info.model_dump() for event in answer.data]
    assert infos[:4] == [
        {"type": "sampling_sample", "token_count": 7},
        {"type": "training", "token_count": 6},
        {"type": "sampling_prefill", "cached": False, "token_count": 5},
        {"type": "sampling_prefill", "cached": True, "token_count": 4},
    ], "most tokens first"
    others = sorted(infos[4:], key=lambda info: info["type"])
    assert others == [
        {"type": "checkpoint", "count": 2},
        {"type": "storage", "free": False, "gigabyte_hours": 1.0},
    ]
    caller = admin.services.authenticator(admin.key)
    for event in answer.data:
        assert (event.bucket_start, event.bucket_end, event.base_model) == (now, now + HOUR, BASE)
        assert (event.session_id, event.project_id, event.user_id) == (
            session,
            caller.project,
            f"tml:organization_user:{caller.user}",
        )
        assert event.estimated_cost_usd is None
    assert answer.sessions[session].user_metadata == {"team": "a", "n": "3"}
    assert answer.cost_data_through is None


def test_usage_is_the_same_from_the_object_store_and_after_the_state_server_was_emptied(admin: Api) -> None:
    model, now = admin.model(), this_hour(admin)
    train(admin, model, {"training": 6})
    age(admin.services.oplog._redis)
    train(admin, model, {"training": 1}, seq=2)
    caller, before = admin.services.authenticator(admin.key), events(admin, window(now - HOUR, 2))
    assert [event.event_info.token_count for event in before.data] == [6, 1]
    sweep(admin)
    assert events(admin, window(now - HOUR, 2)) == before
    admin.services.oplog._redis.flushall()
    kept = BillingUsageResponse.model_validate(admin.services.usage.events(caller, now - HOUR, now + HOUR))
    [expected] = [event.model_copy(update={"user_name": None}) for event in before.data[:1]]
    assert kept.data == [expected], "his name goes with his account, until that is rebuilt"
    assert kept.sessions == before.sessions


def test_a_window_ends_before_its_end(admin: Api) -> None:
    train(admin, admin.model(), {"training": 6})
    now = this_hour(admin)
    assert [len(events(admin, window(at)).data) for at in (now - HOUR, now)] == [0, 1]
    assert events(admin, window(now - 335 * HOUR, 336)).data


def bad_windows(now: datetime) -> dict[str, tuple[str, str]]:
    return {
        window(now, 0): "after starting_on",
        window(now - 337 * HOUR, 337): "14 days",
        window(now + HOUR): "future",
        window(now - HOUR / 2): "start of an hour",
        window(now - HOUR, 1.5): "ending_before",
    }


def test_windows_that_make_no_sense_are_refused(api: Api) -> None:
    ends = {
        "billing/usage/events?starting_on=9999-12-31T22:00:00Z&ending_before=9999-12-31T23:00:00Z": "future",
        "billing/usage/events?starting_on=0001-01-01T00:00:00%2B14:00&ending_before=0001-01-01T10:00:00Z": "1970",
    }
    for path, said in {**bad_windows(this_hour(api)), **ends}.items():
        answer = api.get(path)
        assert (answer.status_code, said in answer.json["detail"]) == (400, True), answer.json
    for path in ("billing/usage/events", "billing/usage/events?starting_on=x&ending_before=2026-01-01T00:00:00Z"):
        assert api.get(path).status_code == 422


def test_admins_see_their_projects_and_nobody_else_any(tenant: Tenant, api: Api, stranger: Api) -> None:
    train(replace(api, key=tenant.key("member")), tenant.ids["model"], {"training": 6})
    now = this_hour(api)
    admin = replace(api, key=tenant.key("admin"))
    [event] = events(admin, window(now)).data
    assert (event.project_id, event.event_info.token_count) == (tenant.project, 6)
    assert event.user_name == "member@example.org", "who opened the session"
    for path in (window(now), "billing/usage/checkpoints/current", "audit"):
        for role in ("member", "viewer"):
            answer = replace(api, key=tenant.key(role)).get(path)
            assert (answer.status_code, "admin" in answer.json["detail"]) == (403, True)
        assert tenant.project not in stranger.get(path).text
    elsewhere = tenant.accounts.add_project(tenant.organisation, "pans").id
    outside = replace(api, key=tenant.key("admin", project=elsewhere))
    assert events(outside, window(now)).data == []
    assert outside.get("billing/usage/checkpoints/current").json["data"] == []


def stored(api: Api, path: str = "billing/usage/checkpoints/current") -> list[dict[str, Any]]:
    answer = api.get(path)
    assert answer.status_code == 200, answer.json
    return CurrentCheckpointStorageUsageResponse.model_validate(answer.json).model_dump(exclude_none=True)["data"]


def test_what_is_stored_is_reported_by_project_and_who_opened_the_session(tenant: Tenant, api: Api) -> None:
    member = replace(api, key=tenant.key("member"))
    save_checkpoint(member, member.model(), size_bytes=2 * 10**9)
    save_checkpoint(member, member.model(), expires_at=1.0)
    admin = replace(api, key=tenant.key("admin"))
    found = stored(admin)
    assert [(each["checkpoint_count"], each["size_bytes"]) for each in found if each["size_bytes"] > 10] == [
        (1, 2 * 10**9)
    ]
    assert {each["user_email"] for each in found} == {"member@example.org"}
    assert [each["user_name"] for each in found] == [each["user_email"] for each in found], "as in usage events"
    assert sum(each["checkpoint_count"] for each in found) == 2
    assert {each["size_gigabytes"] for each in found} == {2.0, 1e-8}
    assert {each["project_id"] for each in found} == {tenant.project}
    pans = tenant.accounts.add_project(tenant.organisation, "pans").id
    other = replace(api, key=tenant.key("member", project=pans))
    save_checkpoint(other, other.model())
    tenant.accounts.set_role(api.services.authenticator(admin.key).user, pans, "admin")
    assert {each["project_id"] for each in stored(admin)} == {tenant.project, pans}
    assert stored(admin, f"billing/usage/checkpoints/current?project_id={tenant.project}") == found


def test_a_project_that_one_does_not_see_is_as_if_it_were_not_there(tenant: Tenant, api: Api, stranger: Api) -> None:
    path = "billing/usage/checkpoints/current?project_id="
    foreign, missing = stranger.get(path + tenant.project), stranger.get(path + "x" * len(tenant.project))
    assert foreign.status_code == missing.status_code == 404
    assert foreign.text.replace(tenant.project, "") == missing.text.replace("x" * len(tenant.project), "")
    assert replace(api, key=tenant.key("viewer")).get(path + tenant.project).status_code == 403

"""The account's pages show limits and use to everybody with a key, and usage and changes to admins."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from app.api.base import EXTENSION
from app.domain.accounts import SCOPES
from app.domain.prices import Prices
from app.domain.results import Result
from app.services.tenants.accounts import AccountService
from app.stores.objects.accounts import AccountFiles
from app.stores.redis.types import Lease
from tests.pages import age
from tests.unit.app.conftest import BASE, KEY, Api, batch
from tests.unit.app.console.conftest import Browser
from tests.unit.app.tenant import Tenant, make_tenant

Browsers = Callable[..., Browser]


@pytest.fixture
def accounts(api: Api) -> AccountService:
    return AccountService(AccountFiles(api.services.objects), api.services.records)


@pytest.fixture
def tenant(api: Api, accounts: AccountService) -> Tenant:
    return make_tenant(api, accounts)


def rows(page: str, label: str) -> list[list[str]]:
    """The cells of a table's rows."""
    table = re.findall(rf'aria-label="{label}">.*?</table>', page, re.DOTALL)[0]
    body = table.split("<tbody>")[1]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in body.split("<tr>")[1:]]


def use(api: Api, tenant: Tenant, trained: int) -> None:
    """A batch of the tenant's run that counts so many trained tokens."""
    model = tenant.ids["model"]
    assert Api(api.client, api.services, tenant.key("member")).forward_backward(batch(model, 1)).status_code == 200
    lease = api.services.oplog.acquire(model, "node/test")
    assert isinstance(lease, Lease)
    sampled = {"sampling_sample": 3, "sampling_prefill": 5, "sampling_prefill_cached": 4}
    usage = {"training": trained, **sampled, "checkpoint": 2, "device": 1500, "storage": 10**12}
    api.services.oplog.commit(lease, 1, Result(b"{}"), usage=usage)


def test_a_key_sees_the_limits_of_its_project_and_their_use(
    tenant: Tenant, accounts: AccountService, browser: Browsers
) -> None:
    project = accounts.add_project(tenant.organisation, "limited").id
    accounts.set_limits(project, {"live_models": 12, "storage_bytes": 5_000_000, "monthly_budget": 1234.56})
    user = accounts.add_user(tenant.organisation, "both@example.org").id
    for its in (project, tenant.project):
        accounts.set_role(user, its, "viewer")
    page = browser(accounts.add_key(user, tenant.project, ())[1]).get("account").text
    shown = {name: cells for name, *cells in rows(page, f"Limits of project {project}")}
    assert shown["live models"] == ["0", "12", "0", "–"]
    assert shown["storage bytes"][:2] == ["0 B", "5 MB"]
    assert shown["monthly budget"][:2] == ["–", "1,234.56"]
    assert {"requests a second", "tokens a second", "live sessions", "checkpoint TTL in seconds"} <= shown.keys()
    assert shown["weight"][1] == "1" and shown["keep checkpoints"] == ["–"] * 4


def test_an_admin_of_one_of_several_projects_finds_the_pages_of_admins(
    tenant: Tenant, accounts: AccountService, browser: Browsers
) -> None:
    user = accounts.add_user(tenant.organisation, "both@example.org").id
    accounts.set_role(user, tenant.project, "viewer")
    logged_in = browser(accounts.add_key(user, tenant.project, ())[1])
    assert "Usage and storage" not in logged_in.get("account").text
    accounts.set_role(user, accounts.add_project(tenant.organisation, "pans").id, "admin")
    assert "Usage and storage" in logged_in.get("account").text


def test_the_use_of_a_project_is_shown(tenant: Tenant, browser: Browsers) -> None:
    page = browser(tenant.key("viewer")).get("account").text
    shown = {name: cells for name, *cells in rows(page, f"Limits of project {tenant.project}")}
    assert shown["live models"][0] == "1" and shown["storage bytes"][0] != "0 B"


def test_an_admin_sees_the_usage_of_each_day_project_and_model(api: Api, tenant: Tenant, browser: Browsers) -> None:
    use(api, tenant, trained=5_242_880)
    page = browser(tenant.key("admin")).get("usage").text
    today = datetime.fromtimestamp(api.services.records.now(), UTC).date()
    (found,) = [cells for cells in rows(page, "Usage of 14 days") if cells[0] == str(today)]
    assert found == [str(today), tenant.project, BASE, "5,242,880", "3", "5", "4", "2"]


def test_the_usage_of_two_projects_is_shown_apart(
    api: Api, tenant: Tenant, accounts: AccountService, browser: Browsers
) -> None:
    other = replace(tenant, project=accounts.add_project(tenant.organisation, "pans").id)
    other.ids = {"model": Api(api.client, api.services, other.key("member")).model()}
    admin = accounts.add_user(tenant.organisation, "both@example.org").id
    for amount, its in ((1234, tenant), (17, other)):
        use(api, its, trained=amount)
        accounts.set_role(admin, its.project, "admin")
    page = browser(accounts.add_key(admin, tenant.project, SCOPES)[1]).get("usage").text
    found = {project: trained for _, project, _, trained, *_ in rows(page, "Usage of 14 days")}
    assert (found[tenant.project], found[other.project]) == ("1,234", "17")


def test_an_admin_sees_the_exact_usage_and_cost_of_each_run(
    api: Api, tenant: Tenant, browser: Browsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(api, tenant, trained=1_234_567)
    cells = [tenant.ids["model"], tenant.project, BASE, "1,234,567", "9", "3", "1.50", "10 B"]
    logged_in = browser(tenant.key("admin"))
    assert cells in rows(logged_in.get("usage").text, "Runs of 14 days")
    application = api.client.application
    for price, cost in ((1000, "1,234.57"), (0.001, "0.001235")):
        usage = replace(api.services.usage, prices_of=lambda base, price=price: Prices(training=price))
        monkeypatch.setitem(application.extensions, EXTENSION, replace(api.services, usage=usage))
        page = logged_in.get("usage").text
        assert [*cells, cost] in rows(page, "Runs of 14 days")
        assert f"Together {cost} US dollars" in page


def test_an_admin_sees_the_stored_checkpoints(api: Api, tenant: Tenant, browser: Browsers) -> None:
    page = browser(tenant.key("admin")).get("usage").text
    (found,) = [cells for cells in rows(page, "Stored checkpoints") if cells[0] == tenant.project]
    assert found[1:3] == ["member@example.org", "1"]


def test_an_admin_sees_the_changes_of_a_day_the_newest_first(api: Api, tenant: Tenant, browser: Browsers) -> None:
    logged_in = browser(tenant.key("admin"))
    logged_in.get("checkpoints")
    logged_in.post("checkpoints/publish", path=tenant.ids["path"], public="yes")
    today = datetime.fromtimestamp(api.services.records.now(), UTC).date()
    found = rows(logged_in.get("events").text, f"Changes on {today}")
    assert found[0][1] == "checkpoint publish" and tenant.ids["path"] in found[0][4]
    assert len(found) > 1
    yesterday = logged_in.get(f"events?day={today - timedelta(days=1)}").text
    assert "Nothing was changed" in yesterday and f"day={today}" in yesterday


def test_an_admin_sees_the_changes_to_one_run_over_days(api: Api, tenant: Tenant, browser: Browsers) -> None:
    run, path = tenant.ids["model"], tenant.ids["path"]
    other = Api(api.client, api.services, tenant.key("member")).model()
    logged_in = browser(tenant.key("admin"))
    assert f'href="/console/runs/{run}/events"' in logged_in.get(f"runs/{run}").text.replace("%3A", ":")
    logged_in.post("checkpoints/publish", path=path, public="yes")
    age(api.services.oplog._redis, hours=72)
    logged_in.post("checkpoints/publish", path=path, public="no")
    found = rows(logged_in.get(f"runs/{run}/events").text, f"Changes to run {run}")
    assert [cells[1] for cells in found][:2] == ["checkpoint unpublish", "checkpoint publish"]
    assert "run create" in [cells[1] for cells in found]
    assert other not in str(found)


def test_a_run_that_came_from_another_project_says_so(
    api: Api, tenant: Tenant, accounts: AccountService, browser: Browsers
) -> None:
    pans = accounts.add_project(tenant.organisation, "pans").id
    admin = accounts.add_user(tenant.organisation, "both@example.org").id
    for project in (tenant.project, pans):
        accounts.set_role(admin, project, "admin")
    key = accounts.add_key(admin, tenant.project, SCOPES)[1]
    api.services.sessions.move(tenant.ids["session"], api.services.authenticator(key), pans)
    run = tenant.ids["model"]
    (found,) = rows(browser(key).get(f"runs/{run}/events").text, f"Changes to run {run}")
    assert found[1] == "session move" and tenant.project in str(found) and pans in str(found)


def test_the_changes_to_a_run_are_seen_by_its_admins_alone(tenant: Tenant, browser: Browsers) -> None:
    run = tenant.ids["model"]
    member, stranger = browser(tenant.key("member")), browser(KEY)
    assert "/events" not in member.get(f"runs/{run}").text
    assert member.get(f"runs/{run}/events").status_code == 403
    assert stranger.get(f"runs/{run}/events").status_code == 404


def test_nobody_else_sees_changes_or_usage(tenant: Tenant, browser: Browsers) -> None:
    member = browser(tenant.key("member"))
    assert member.get("events").status_code == member.get("usage").status_code == 403
    assert "/console/usage" not in member.get("account").text


@pytest.mark.parametrize("day", ["foo", "0001-01-01", "9999-12-31", "1969-12-31"])
def test_a_day_without_changes_is_refused_in_words(tenant: Tenant, browser: Browsers, day: str) -> None:
    answer = browser(tenant.key("admin")).get(f"events?day={day}")
    assert answer.status_code == 400 and day in answer.text


def test_the_changes_begin_in_1970(tenant: Tenant, browser: Browsers) -> None:
    page = browser(tenant.key("admin")).get("events?day=1970-01-01")
    assert page.status_code == 200 and "day=1969-12-31" not in page.text

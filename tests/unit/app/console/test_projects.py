"""The pages of projects: the operator administers all of them, an admin only the own ones, and nobody else any."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from flask import Flask

from app.api.base import EXTENSION
from app.domain.accounts import Key, Project, User
from app.domain.limits import Limits
from app.services.tenants.accounts import AccountService
from app.settings import LimitSettings
from app.stores.objects.accounts import AccountFiles
from tests.logs import everything_logged
from tests.unit.app.conftest import KEY, OPERATOR_KEY, Api
from tests.unit.app.console.conftest import Browser
from tests.unit.app.console.test_account import rows
from tests.unit.app.tenant import Tenant, make_tenant

Browsers = Callable[..., Browser]
FORMS: dict[str, dict[str, Any]] = {
    "members": {"email": "viewer@example.org", "role": "admin"},
    "role": {"user": "{user}", "role": "admin"},
    "keys": {"user": "{user}", "scope": "train"},
    "keys/revoke": {"key": "{key}", "sure": "yes"},
    "limits": {"keep_checkpoints": "3", "sure": "yes"},
}


@pytest.fixture
def accounts(api: Api) -> AccountService:
    """Accounts without those of earlier tests: the object store, which outlives a test, is not read again."""
    api.services.records.put("recalled", "accounts", {"done": "true"})
    return AccountService(AccountFiles(api.services.objects), api.services.records)


@pytest.fixture
def tenant(api: Api, accounts: AccountService) -> Tenant:
    return make_tenant(api, accounts)


def user_of(key: str, accounts: AccountService) -> str:
    id_ = key.removeprefix("tml-").partition(".")[0]
    return next(found.user for found in accounts.all(Key) if found.id == id_)


def everything(accounts: AccountService) -> list[object]:
    return [*accounts.all(Project), *accounts.all(User), *accounts.all(Key)]


def limits_of(tenant: Tenant) -> dict[str, Any]:
    return next(found.limits for found in tenant.accounts.all(Project) if found.id == tenant.project)


def shown_key(page: str) -> str:
    return str(re.findall(r'id="key">([^<]+)<', page)[0])


def log(api: Api, *scopes: str) -> list[tuple[str, str]]:
    """The event and the author of each audit entry, in the order of time."""
    entries = api.services.audit.of(list(scopes), "all", datetime.fromtimestamp(api.services.records.now(), UTC).date())
    return [(entry["event"], entry["event_details"]["user_id"]) for entry in entries]


def opened(browsers: Browsers, key: str, tenant: Tenant) -> Browser:
    browser = browsers(key)
    assert browser.get(f"projects/{tenant.project}").status_code == 200
    return browser


def test_the_operator_makes_a_project_with_a_member_and_a_key_that_works(
    api: Api, accounts: AccountService, browser: Browsers
) -> None:
    operator = browser(OPERATOR_KEY)
    operator.get("projects")
    operator.post("organisations", name="Coopers")
    (organisation,) = re.findall(r'<option value="([^"]+)">Coopers', operator.get("projects").text)
    path = operator.post("projects", name="barrels", organisation=organisation).headers["Location"]
    project = path.rpartition("/")[2]
    assert "barrels" in operator.get("projects").text
    operator.post(f"projects/{project}/members", email="jo@example.org", role="member")
    ((email, user, role, _),) = rows(operator.get(f"projects/{project}").text, "Members")
    assert (email, role) == ("jo@example.org", "member")
    user = re.findall(r"<code>(.*)</code>", user)[0]
    key = shown_key(operator.post(f"projects/{project}/keys", user=user, scope=["train"], name="laptop", days="9").text)
    caller = api.services.authenticator(key)
    assert (caller.user, caller.roles) == (user, {project: "member"}) and caller.scopes == frozenset({"train"})
    (made,) = [found for found in accounts.all(Key) if found.id == caller.key_id]
    assert made.name == "laptop" and made.expires_at == pytest.approx(made.created + 9 * 86_400)
    by = f"tml:organization_user:{api.services.authenticator(OPERATOR_KEY).user}"
    events = log(api, project)
    assert events == [("project_create", by), ("project_role_set", by), ("key_create", by)]


def test_a_new_key_is_shown_once_and_kept_and_logged_nowhere(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    admin_key = tenant.key("admin")
    admin = opened(browser, admin_key, tenant)
    with everything_logged() as logged:
        answer = admin.post(f"projects/{tenant.project}/keys", user=user_of(admin_key, accounts), scope="sample")
    secret = shown_key(answer.text).partition(".")[2]
    assert len(secret) >= 43 and answer.headers["Cache-Control"] == "no-store"
    assert secret not in logged.getvalue()
    assert secret not in admin.get(f"projects/{tenant.project}").text
    assert not any(secret in str(found) for found in accounts.all(Key))


def test_a_key_of_the_page_works_in_this_project_alone_also_after_its_user_joins_another(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    user = user_of(tenant.key("member"), accounts)
    admin = opened(browser, tenant.key("admin"), tenant)
    key = shown_key(admin.post(f"projects/{tenant.project}/keys", user=user, scope="train").text)
    other = accounts.add_project(tenant.organisation, "secret").id
    accounts.set_role(user, other, "admin")
    assert api.services.authenticator(key).roles == {tenant.project: "member"}
    accounts.set_role(user, tenant.project, None)
    assert api.services.authenticator(key).roles == {}


def test_a_key_makes_no_key_that_can_do_more_or_lives_longer(
    accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    admin_key = tenant.key("admin")
    user = user_of(admin_key, accounts)
    weak = accounts.add_key(user, tenant.project, ["manage"], lifetime_s=5 * 86_400)[1]
    browser_ = opened(browser, weak, tenant)
    form = f"projects/{tenant.project}/keys"
    before = len(accounts.all(Key))
    for scope, days in (("train", "1"), ("manage", ""), ("manage", "6")):
        assert browser_.post(form, user=user, scope=scope, days=days).status_code == 403
    assert len(accounts.all(Key)) == before
    assert browser_.post(form, user=user, scope="manage", days="4").status_code == 200


def test_a_key_is_revoked_only_after_a_second_press(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    admin_key = tenant.key("admin")
    admin = opened(browser, admin_key, tenant)
    key = shown_key(admin.post(f"projects/{tenant.project}/keys", user=user_of(admin_key, accounts)).text)
    id_ = api.services.authenticator(key).key_id
    asked = admin.post(f"projects/{tenant.project}/keys/revoke", key=id_)
    assert asked.status_code == 200 and id_ in asked.text and f'name="key" value="{id_}"' in asked.text
    assert api.services.authenticator(key)
    admin.post(f"projects/{tenant.project}/keys/revoke", key=id_, sure="yes")
    assert api.client.get("/api/v1/training_runs", headers={"X-API-Key": key}).status_code == 401
    assert id_ not in admin.get(f"projects/{tenant.project}").text
    assert log(api, tenant.project)[-1] == ("key_revoke", f"tml:organization_user:{user_of(admin_key, accounts)}")


def test_an_admin_revokes_no_key_that_works_in_other_projects_of_another_user(
    api: Api, tenant: Tenant, browser: Browsers
) -> None:
    key = tenant.key("member")
    id_ = key.removeprefix("tml-").partition(".")[0]
    admin, operator = opened(browser, tenant.key("admin"), tenant), opened(browser, OPERATOR_KEY, tenant)
    form = f"projects/{tenant.project}/keys/revoke"
    for sure in ("", "yes"):
        assert admin.post(form, key=id_, sure=sure).status_code == 403
    assert api.services.authenticator(key)
    assert operator.post(form, key=id_, sure="yes").status_code == 302
    assert api.client.get("/api/v1/training_runs", headers={"X-API-Key": key}).status_code == 401


def test_a_key_that_an_admin_made_for_a_user_revokes_no_key_of_this_user_in_other_projects(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    key, own = tenant.key("member"), tenant.key("admin")
    user, admin = user_of(key, accounts), opened(browser, own, tenant)
    path = f"projects/{tenant.project}"
    admin.post(f"{path}/role", user=user, role="admin")
    made = shown_key(admin.post(f"{path}/keys", user=user, scope="manage").text)
    form, id_ = f"{path}/keys/revoke", key.removeprefix("tml-").partition(".")[0]
    as_user = opened(browser, made, tenant)
    for sure in ("", "yes"):
        assert as_user.post(form, key=id_, sure=sure).status_code == 403
    assert api.services.authenticator(key)
    assert opened(browser, key, tenant).post(form, key=id_, sure="yes").status_code == 302, "the user still may"


def test_an_admin_changes_roles_and_removes_members(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    viewer = tenant.key("viewer")
    admin, user = opened(browser, tenant.key("admin"), tenant), user_of(viewer, accounts)
    form = f"projects/{tenant.project}/role"
    admin.post(form, user=user, role="member")
    assert api.services.authenticator(viewer).roles == {tenant.project: "member"}
    admin.post(form, user=user, role="none")
    assert api.services.authenticator(viewer).roles == {}
    assert admin.post(form, user=user, role="member").status_code == 404, "it is no member any more"
    admin.post(f"projects/{tenant.project}/members", email="Viewer@example.org", role="viewer")
    assert api.services.authenticator(viewer).roles == {tenant.project: "viewer"}


def test_an_admin_adds_users_of_the_organisation_and_creates_none(
    accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    elsewhere = accounts.add_organisation("Elsewhere").id
    accounts.add_user(elsewhere, "stranger@example.org")
    removed = accounts.add_user(tenant.organisation, "gone@example.org").id
    accounts.remove_user(removed)
    admin, before = opened(browser, tenant.key("admin"), tenant), accounts.all(User)
    for email in ("stranger@example.org", "gone@example.org", "new@example.org"):
        answer = admin.post(f"projects/{tenant.project}/members", email=email, role="viewer")
        assert answer.status_code == 404 and email in answer.text
    assert accounts.all(User) == before


def test_an_email_of_two_users_is_refused(accounts: AccountService, tenant: Tenant, browser: Browsers) -> None:
    for _ in range(2):
        accounts.add_user(tenant.organisation, "twin@example.org")
    operator = opened(browser, OPERATOR_KEY, tenant)
    answer = operator.post(f"projects/{tenant.project}/members", email="twin@example.org", role="viewer")
    assert answer.status_code == 400 and "2 users" in answer.text


def test_an_admin_sets_how_long_checkpoints_are_kept_and_no_other_limit(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    admin_key = tenant.key("admin")
    admin, form = opened(browser, admin_key, tenant), f"projects/{tenant.project}/limits"
    assert admin.post(form, checkpoint_ttl_s="7200").status_code == 302
    assert limits_of(tenant) == {"checkpoint_ttl_s": 7200}
    by = f"tml:organization_user:{user_of(admin_key, accounts)}"
    assert log(api, tenant.project)[-1] == ("project_limits_set", by)
    for name in ("storage_bytes", "weight", "requests_per_s"):
        assert admin.post(form, **{name: "none" if name != "weight" else "9"}).status_code == 403
    assert limits_of(tenant) == {"checkpoint_ttl_s": 7200}
    page = admin.get(f"projects/{tenant.project}").text
    disabled = re.findall(r'<input id="([^"]+)"[^>]* disabled', page)
    assert {"storage_bytes", "weight"} <= set(disabled) and not {"checkpoint_ttl_s", "keep_checkpoints"} & set(disabled)


def test_keeping_fewer_checkpoints_takes_a_second_press(tenant: Tenant, browser: Browsers) -> None:
    admin, form = opened(browser, tenant.key("admin"), tenant), f"projects/{tenant.project}/limits"
    asked = admin.post(form, keep_checkpoints="5", checkpoint_ttl_s="7200")
    assert asked.status_code == 200 and "5 newest" in asked.text and limits_of(tenant) == {}
    assert 'name="keep_checkpoints" value="5"' in asked.text and 'name="checkpoint_ttl_s" value="7200"' in asked.text
    admin.post(form, keep_checkpoints="5", sure="yes")
    assert limits_of(tenant) == {"keep_checkpoints": 5}
    assert admin.post(form, keep_checkpoints="4").status_code == 200
    assert admin.post(form, keep_checkpoints="9").status_code == 302
    assert limits_of(tenant) == {"keep_checkpoints": 9}
    assert admin.post(form, keep_checkpoints="").status_code == 302
    assert limits_of(tenant) == {}


def test_going_back_to_a_smaller_number_of_the_settings_takes_a_second_press_too(
    api: Api, app: Flask, tenant: Tenant, browser: Browsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, form = opened(browser, tenant.key("admin"), tenant), f"projects/{tenant.project}/limits"
    limits = LimitSettings(project=Limits(keep_checkpoints=5))
    settings = api.services.settings.model_copy(update={"limits": limits})
    monkeypatch.setitem(app.extensions, EXTENSION, replace(api.services, settings=settings))
    assert admin.post(form, keep_checkpoints="9").status_code == 302
    asked = admin.post(form, keep_checkpoints="")
    assert asked.status_code == 200 and "5 newest" in asked.text
    assert limits_of(tenant) == {"keep_checkpoints": 9}


def test_the_operator_sets_every_limit_and_the_form_repeats_it(tenant: Tenant, browser: Browsers) -> None:
    operator, form = opened(browser, OPERATOR_KEY, tenant), f"projects/{tenant.project}/limits"
    given = {"storage_bytes": "123456789012", "tokens_per_s": "1.5", "live_models": "none", "weight": "2"}
    assert operator.post(form, **given).status_code == 302
    limits = {"storage_bytes": 123456789012, "tokens_per_s": 1.5, "live_models": None, "weight": 2.0}
    assert limits_of(tenant) == limits
    fields = dict(
        re.findall(
            r'<input id="(\w+)" name="\w+" type="text" inputmode="decimal" value="([^"]*)"',
            operator.get(f"projects/{tenant.project}").text,
        )
    )
    version = [found.version for found in tenant.accounts.all(Project)]
    assert operator.post(form, **fields).status_code == 302
    assert [found.version for found in tenant.accounts.all(Project)] == version, "nothing was changed"
    for name, text in (("live_models", "1.5"), ("weight", "none"), ("tokens_per_s", "x"), ("checkpoint_ttl_s", "5")):
        answer = operator.post(form, **{name: text})
        assert answer.status_code == 400 and name in unescape(answer.text)
    assert limits_of(tenant) == limits


def form_of_limits(page: str) -> dict[str, str]:
    """The fields that a browser sends for the page's form of limits, also the hidden ones."""
    form = page[page.index('/limits"') :].partition("</form>")[0]
    return dict(re.findall(r'<input [^>]*?name="(\w+)" [^>]*?value="([^"]*)"', form))


def test_the_form_of_limits_leaves_alone_what_somebody_else_changed_since_its_page_was_loaded(
    tenant: Tenant, browser: Browsers
) -> None:
    path = f"projects/{tenant.project}"
    operator, other = (opened(browser, OPERATOR_KEY, tenant) for _ in range(2))
    operator.post(f"{path}/limits", storage_bytes="1000", keep_checkpoints="9", sure="yes")
    fields = form_of_limits(operator.get(path).text)
    given = {"storage_bytes": "2000", "keep_checkpoints": "", "requests_per_s": "3"}
    assert other.post(f"{path}/limits", **given).status_code == 302
    assert operator.post(f"{path}/limits", **{**fields, "checkpoint_ttl_s": "7200"}).status_code == 302
    assert limits_of(tenant) == {"storage_bytes": 2000, "requests_per_s": 3.0, "checkpoint_ttl_s": 7200}


def test_the_second_press_sends_what_the_page_of_the_form_showed(tenant: Tenant, browser: Browsers) -> None:
    path = f"projects/{tenant.project}"
    operator, other = (opened(browser, OPERATOR_KEY, tenant) for _ in range(2))
    fields = form_of_limits(operator.get(path).text)
    asked = operator.post(f"{path}/limits", **{**fields, "keep_checkpoints": "5"})
    assert asked.status_code == 200 and "5 newest" in asked.text
    other.post(f"{path}/limits", storage_bytes="2000")
    assert operator.post(f"{path}/limits", **form_of_limits(asked.text), sure="yes").status_code == 302
    assert limits_of(tenant) == {"storage_bytes": 2000, "keep_checkpoints": 5}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("role", "status"), [("member", 403), ("viewer", 403), ("stranger", 404), ("settings", 404)])
def test_nobody_else_sees_or_changes_a_project(
    api: Api, accounts: AccountService, tenant: Tenant, browser: Browsers, form: str, role: str, status: int
) -> None:
    """A stranger is an admin of another project of the same organisation."""
    its = accounts.add_key(user_of(tenant.key("admin"), accounts), tenant.project, (), only_project=True)[0]
    other = accounts.add_project(tenant.organisation, "other").id
    keys = {"settings": KEY, "stranger": tenant.key("admin", project=other)}
    logged_in = browser(keys[role] if role in keys else tenant.key("viewer" if role == "viewer" else "member"))
    before = everything(accounts)
    path = f"projects/{tenant.project}"
    assert logged_in.get(path).status_code == status
    assert "kettles" not in logged_in.get("projects").text
    logged_in.get("account")
    values = {name: value.format(user=its.user, key=its.id) for name, value in FORMS[form].items()}
    assert logged_in.post(f"{path}/{form}", **values).status_code == status
    missing = logged_in.post(f"projects/project-000000000000/{form}", **values)
    assert missing.status_code == 404
    assert everything(accounts) == before


def test_an_admin_reaches_no_key_or_user_of_another_project(
    accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    other = accounts.add_project(tenant.organisation, "other").id
    user = user_of(tenant.key("member", project=other), accounts)
    key = accounts.add_key(user, other, ["train"], only_project=True)[0]
    admin, path = opened(browser, tenant.key("admin"), tenant), f"projects/{tenant.project}"
    assert admin.post(f"{path}/keys/revoke", key=key.id, sure="yes").status_code == 404
    assert admin.post(f"{path}/keys", user=user).status_code == 404
    assert admin.post(f"{path}/role", user=user, role="viewer").status_code == 404
    assert key.id not in admin.get(path).text and user not in admin.get(path).text


def test_only_the_operator_makes_projects_and_organisations(
    accounts: AccountService, tenant: Tenant, browser: Browsers
) -> None:
    for key in (tenant.key("admin"), KEY):
        logged_in = browser(key)
        assert "New project" not in logged_in.get("projects").text
        logged_in.get("account")
        assert logged_in.post("projects", name="x", organisation=tenant.organisation).status_code == 403
        assert logged_in.post("organisations", name="x").status_code == 403
    assert len(accounts.all(Project)) == 1


def test_the_operator_sees_no_runs_of_a_project(tenant: Tenant, browser: Browsers) -> None:
    operator = browser(OPERATOR_KEY)
    assert operator.get(f"runs/{tenant.ids['model']}").status_code == 404
    assert operator.get("events").status_code == 200 and tenant.project not in operator.get("events").text


@pytest.mark.parametrize(
    ("form", "values", "said"),
    [
        ("members", {"email": "a@b", "role": "king"}, "king"),
        ("keys", {"user": "x", "scope": "rule"}, "rule"),
        ("keys", {"user": "x", "days": "0"}, "days"),
        ("keys", {"user": "x", "days": "nan"}, "nan"),
        ("keys", {"user": "x", "days": "3651"}, "days"),
        ("keys", {"user": "x", "days": "0000000019"}, "days"),
        ("keys", {"user": "x", "days": "9" * 5000}, "days"),
        ("keys", {"user": "x", "days": "000000001" + "9" * 300}, "days"),
        ("limits", {"storage_bytes": "1e400"}, "storage_bytes"),
        ("limits", {"keep_checkpoints": "0"}, "keep_checkpoints"),
        ("members", {"email": "", "role": "viewer"}, "name"),
    ],
)
def test_a_wrong_value_is_refused_in_words(
    tenant: Tenant, browser: Browsers, form: str, values: dict[str, str], said: str
) -> None:
    answer = opened(browser, OPERATOR_KEY, tenant).post(f"projects/{tenant.project}/{form}", **values)
    assert answer.status_code == 400 and said in answer.text


def test_the_pages_bring_the_accounts_back_after_the_state_server_was_emptied(
    api: Api, tenant: Tenant, browser: Browsers
) -> None:
    operator = opened(browser, OPERATOR_KEY, tenant)
    api.services.oplog._redis.flushall()
    assert operator.get(f"projects/{tenant.project}").status_code == 200

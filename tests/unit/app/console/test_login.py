"""Nothing of the console is seen or changed without a login, or by another site."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from flask import Flask
from flask.sessions import SecureCookieSessionInterface

from app.console import login
from app.services.tenants.accounts import AccountService
from app.services.tenants.authentication import Tokens
from app.settings import ApiSettings, Settings
from app.stores.objects.accounts import AccountFiles
from tests.logs import everything_logged
from tests.unit.app.conftest import KEY, OTHER_KEY, Api
from tests.unit.app.console.conftest import FORMS, Browser
from tests.unit.app.tenant import make_tenant

PAGES = [
    "runs",
    "runs/x",
    "runs/x/curves.csv",
    "runs/x/events",
    "compare",
    "checkpoints",
    "checkpoints/download?path=tinker://a/weights/b",
    "queue",
    "account",
    "usage",
    "events",
    "playground",
    "projects",
    "projects/x",
    "none",
]
OF_A_PROJECT = [f"projects/<project>/{form}" for form in ("members", "role", "keys", "keys/revoke", "limits")]
ALL_FORMS = [*FORMS, "playground", "projects", "organisations", *OF_A_PROJECT]


class Unreadable(io.RawIOBase):
    """A body that never arrives."""

    def readable(self) -> bool:
        return True

    def readinto(self, _: object) -> int:
        pytest.fail("the body was read")

    def tell(self) -> int:
        return 0

    def seek(self, at: int, _: int = 0) -> int:
        return at


def cookie_name(app: Flask) -> str:
    return app.session_interface.get_cookie_name(app)


@pytest.mark.parametrize("path", ["/", "/console", "/console/"])
def test_the_console_begins_at_its_own_address(api: Api, app: Flask, path: str) -> None:
    answer = app.test_client().get(path, follow_redirects=True)
    assert (answer.status_code, answer.request.path) == (200, "/console/login")


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_seen_without_a_login(api: Api, app: Flask, path: str) -> None:
    answer = Browser(app).get(path)
    assert (answer.status_code, answer.headers["Location"]) == (302, "/console/login")


@pytest.mark.parametrize("path", ALL_FORMS)
def test_no_form_works_without_a_login(api: Api, app: Flask, path: str) -> None:
    browser = Browser(app)
    browser.get("login")
    assert browser.post(path, path="tinker://a/weights/b").headers["Location"] == "/console/login"


@pytest.mark.parametrize("path", [*ALL_FORMS, "login", "logout"])
def test_a_form_of_another_site_changes_nothing(browser: Callable[..., Browser], path: str) -> None:
    """Such a form carries no token of this site's pages."""
    logged_in = browser()
    answer = logged_in.post(path, csrf_token="", path="tinker://a/weights/b", api_key=OTHER_KEY)
    assert answer.status_code == 403
    assert logged_in.get("runs").status_code == 200


def test_a_form_without_a_cookie_is_refused_before_its_body_is_read(api: Api, app: Flask) -> None:
    """A slow body of anybody would hold a thread."""
    form = {"content_type": "application/x-www-form-urlencoded", "content_length": 100}
    answer = app.test_client().post("/console/login", input_stream=cast(Any, Unreadable()), **cast(Any, form))
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "headers", [{"Transfer-Encoding": "chunked"}, {"Content-Length": "9", "Expect": "100-continue"}]
)
def test_a_form_that_the_event_loop_does_not_wait_for_is_refused_unread(
    api: Api, app: Flask, headers: dict[str, str]
) -> None:
    """Such a slow body would hold a thread, and everybody gets a cookie with the login's page."""
    client = app.test_client()
    client.get("/console/login")
    form = {"content_type": "application/x-www-form-urlencoded", "headers": headers}
    answer = client.post("/console/login", input_stream=cast(Any, Unreadable()), **cast(Any, form))
    assert answer.status_code == 411


@pytest.mark.parametrize("token", ["\u00e9", "x"])
def test_a_form_with_a_wrong_token_is_refused(browser: Callable[..., Browser], token: str) -> None:
    assert browser().post("logout", csrf_token=token).status_code == 403


def test_a_link_of_another_site_does_not_end_a_login(api: Api, app: Flask) -> None:
    """A browser may leave the cookie out of such a request."""
    assert "Set-Cookie" not in app.test_client().get("/console/runs").headers


def test_a_login_ends_twelve_hours_after_it_began(app: Flask, browser: Callable[..., Browser]) -> None:
    logged_in = browser()
    cookie = logged_in._client.get_cookie(cookie_name(app), path="/console")
    assert cookie is not None and cookie.max_age is None and cookie.expires is not None
    assert 43_000 < cookie.expires.timestamp() - time.time() <= 43_200
    assert "Set-Cookie" not in logged_in.get("runs").headers, "a page that is loaded again prolongs nothing"


def test_a_large_form_is_refused_with_the_limit(browser: Callable[..., Browser]) -> None:
    for form, most in (("checkpoints/publish", 16_384), ("playground", 1_048_576)):
        answer = browser().post(form, path="x" * most)
        assert (answer.status_code, f"at most {most:,}" in answer.text) == (413, True)


def test_a_long_prompt_is_read_after_the_login_alone(api: Api, app: Flask) -> None:
    """The event loop does not wait for it, so a slow one would hold a thread."""
    client = app.test_client()
    client.get("/console/login")
    form = {"content_type": "application/x-www-form-urlencoded", "content_length": 2**20}
    answer = client.post("/console/playground", input_stream=cast(Any, Unreadable()), **cast(Any, form))
    assert answer.headers["Location"] == "/console/login"


def test_every_route_that_changes_something_needs_the_scope_that_the_api_asks_for(app: Flask) -> None:
    changing = {
        rule.rule: getattr(app.view_functions[rule.endpoint], "scopes", ())
        for rule in app.url_map.iter_rules()
        if rule.rule.startswith("/console") and "POST" in (rule.methods or ())
    }
    assert changing == {
        **{f"/console/{path}": ("manage",) for path in (*FORMS, *OF_A_PROJECT, "projects", "organisations")},
        "/console/playground": ("sample",),
        "/console/login": (),
        "/console/logout": (),
    }


def test_a_token_is_no_login(api: Api, app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cookie would outlive it."""
    tokens = Tokens("s" * 32, 60.0)
    monkeypatch.setattr(api.services.authenticator, "_tokens", tokens)
    browser = Browser(app)
    answer = browser.log_in(tokens.issue(api.services.authenticator(KEY), ""))
    assert answer.status_code == 401 and "log in with the key itself" in answer.text
    assert browser.get("runs").status_code == 302


@pytest.mark.parametrize("key", ["", "tml-wrong", "eyJhbGciOiJIUzI1NiJ9.e30.x"])
def test_a_wrong_key_is_refused_and_not_repeated(api: Api, app: Flask, key: str) -> None:
    answer = Browser(app).log_in(key)
    assert answer.status_code == 401 and 'role="alert"' in answer.text
    assert not key or key not in answer.text


def test_the_cookie_holds_no_key_and_no_script_reads_it(api: Api, app: Flask) -> None:
    with everything_logged() as logged:
        cookie = Browser(app).log_in(KEY).headers["Set-Cookie"]
    interface = app.session_interface
    assert isinstance(interface, SecureCookieSessionInterface)
    signed = interface.get_signing_serializer(app)
    assert signed is not None
    held = signed.loads(cookie.partition("=")[2].partition(";")[0])
    assert held["key"] and KEY not in str(held) and KEY not in logged.getvalue()
    assert {"HttpOnly", "SameSite=Lax", "Path=/console"} <= set(cookie.split("; "))


@pytest.mark.parametrize(
    ("public_url", "is_secure"),
    [("https://tinsmith.example.org", True), ("http://10.0.0.1:8000", False), ("", False)],
)
def test_the_cookie_goes_over_tls_only_if_the_public_address_is_https(public_url: str, is_secure: bool) -> None:
    app = Flask(__name__)
    login.configure(app, Settings(api=ApiSettings(public_url=public_url)))
    assert app.session_interface.get_cookie_secure(app) == is_secure


def test_servers_on_several_ports_of_a_host_keep_their_own_logins() -> None:
    """A browser sends a cookie to all ports. The processes of one server share their secret, and so the login."""
    names = []
    for secret in ("a" * 32, "a" * 32, "b" * 32):
        app = Flask(__name__)
        login.configure(app, Settings(url_secret=secret))
        names.append(cookie_name(app))
    assert names[0] == names[1] != names[2]


def test_a_login_makes_a_new_token_for_forms(api: Api, app: Flask) -> None:
    """Whoever planted the cookie of the login's page knows the token in it."""
    browser = Browser(app)
    browser.get("login")
    planted = browser._token
    browser.post("login", api_key=KEY)
    browser.get("runs")
    assert browser._token != planted
    assert browser.post("logout", csrf_token=planted).status_code == 403


def test_a_cookie_that_was_changed_is_no_login(browser: Callable[..., Browser], app: Flask) -> None:
    logged_in = browser()
    cookie = logged_in._client.get_cookie(cookie_name(app), path="/console")
    assert cookie is not None
    forged = Browser(app)
    forged._client.set_cookie(cookie_name(app), cookie.value[:-2] + "xx", path="/console")
    assert forged.get("runs").status_code == 302


def test_a_revoked_key_ends_its_logins_at_once(api: Api, app: Flask, browser: Callable[..., Browser]) -> None:
    accounts = AccountService(AccountFiles(api.services.objects), api.services.records)
    tenant = make_tenant(api, accounts)
    key = tenant.key("member")
    logged_in = browser(key)
    accounts.revoke(key.removeprefix("tml-").partition(".")[0])
    answer = logged_in.get("runs")
    assert answer.status_code == 302 and f"{cookie_name(app)}=;" in answer.headers["Set-Cookie"]
    part = logged_in.get("runs", HX_Request="true")
    assert (part.status_code, part.headers["HX-Redirect"]) == (204, "/console/login"), "htmx would show it in the table"


def test_after_logging_out_no_page_is_seen(browser: Callable[..., Browser]) -> None:
    logged_in = browser()
    logged_in.post("logout")
    assert logged_in.get("runs").status_code == 302


def test_the_api_takes_no_cookie(api: Api, app: Flask, browser: Callable[..., Browser]) -> None:
    cookie = browser()._client.get_cookie(cookie_name(app), path="/console")
    assert cookie is not None
    client = api.client.application.test_client(use_cookies=False)  # with its path, a browser would send it to no call
    headers = {"Cookie": f"{cookie_name(app)}={cookie.value}"}
    assert client.get("/console/runs", headers=headers).status_code == 200
    assert client.get("/api/v1/training_runs", headers=headers).status_code == 401


def test_without_a_secret_the_page_says_what_to_set(api: Api, app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "secret_key", None)
    answer = app.test_client().get("/console/login")
    assert answer.status_code == 404 and "url_secret" in answer.text

"""Login to the console: an API key, exchanged for a signed cookie that names the key's id.

The key itself is not stored. It is looked up at each request, so a revoked key ends its logins at once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta

from flask import (
    Blueprint,
    Flask,
    Request,
    Response,
    abort,
    current_app,
    g,
    make_response,
    redirect,
    render_template,
    request,
    session,
    url_for,
)
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface
from werkzeug.wrappers import Response as AnyResponse

from app.api.base import services
from app.errors import NotFound, RequestError, Unauthorized
from app.settings import Settings

_KEY, _CSRF, _FIELD = "key", "csrf", "csrf_token"
_PATH = "/console"
_LIFETIME = timedelta(hours=12)
_MOST_FORM_BYTES = 16 * 1024
_PLAY, _MOST_PLAY_BYTES = "console.play", 2**20
"""The form with a prompt. A Chinese character takes 9 bytes in it."""


class _ConsoleSessions(SecureCookieSessionInterface):
    """Reads the cookie for pages of the console only. Other routes use no session, and looking for one takes 0.05 ms of
    the 0.4 ms that a small call takes."""

    def open_session(self, app: Flask, request: Request) -> SecureCookieSession | None:
        return super().open_session(app, request) if request.path.startswith(_PATH) else SecureCookieSession()


def configure(app: Flask, settings: Settings) -> None:
    """Sets up the cookie. Its signature is made with a key of its own, derived from the server's secret."""
    name = "tinsmith_console"
    if settings.url_secret:
        app.secret_key = hmac.new(settings.url_secret.encode(), b"console", hashlib.sha256).digest()
        # A browser sends a host's cookies to all of its ports, where other servers may be.
        name += f"_{hashlib.sha256(app.secret_key).hexdigest()[:8]}"
    app.session_interface = _ConsoleSessions()
    app.config.update(
        SESSION_COOKIE_NAME=name,
        SESSION_COOKIE_PATH=_PATH,
        # A link on another site, such as a dashboard, finds the login. Each form has a token of its own.
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=settings.public_url.startswith("https://"),
        PERMANENT_SESSION_LIFETIME=_LIFETIME,
        SESSION_REFRESH_EACH_REQUEST=False,
    )


def csrf_token() -> str:
    """The token that each form sends back, so that no other site can send one in a user's name."""
    if _CSRF not in session:
        session[_CSRF] = secrets.token_urlsafe(24)
    return str(session[_CSRF])


def add(blueprint: Blueprint) -> None:
    """Adds the login's pages to the console, and lets no other page answer without a login."""
    blueprint.add_url_rule("/login", "login", _show, methods=["GET"])
    blueprint.add_url_rule("/login", "enter", _enter, methods=["POST"])
    blueprint.add_url_rule("/logout", "leave", _leave, methods=["POST"])
    open_endpoints = frozenset(f"{blueprint.name}.{name}" for name in ("login", "enter", "leave", "static"))

    @blueprint.before_request
    def guard() -> AnyResponse | None:
        if current_app.secret_key is None:
            raise NotFound("the console needs url_secret in the config file: set it to 32 random characters or more")
        if request.endpoint not in open_endpoints:
            try:
                g.caller = services().authenticator.holder(session.get(_KEY, ""))
            except Unauthorized:
                if _KEY in session:
                    session.clear()
                return _to_login()
        if request.method == "POST":
            _check_form()
        return None


def _check_form() -> None:
    """Answers 403 unless this browser got the form from here. Without a login only a body that has arrived is read: the
    event loop waits for those of a client with a cookie, if they have a length and no Expect header
    (app/gunicorn_worker.py). It does not wait for a long prompt, so that takes a login."""
    most = _MOST_PLAY_BYTES if request.endpoint == _PLAY else _MOST_FORM_BYTES
    if request.content_length is None or "Expect" in request.headers:
        abort(411, "send the form with its length, and without an Expect header")
    if request.content_length > most:
        abort(
            413,
            f"the form has {request.content_length:,} bytes; at most {most:,} are allowed: go back and shorten its "
            "text, in which a character that is not ASCII takes 6 to 12 bytes",
        )
    request.max_content_length = most
    if _CSRF not in session or not hmac.compare_digest(request.form.get(_FIELD, "").encode(), session[_CSRF].encode()):
        abort(403, "this form is too old: load its page again")


def _to_login() -> AnyResponse:
    """Sends the browser to the login. htmx follows a redirect itself and would show the login in a part of the page, so
    it gets a header instead."""
    if request.headers.get("HX-Request"):
        return make_response("", 204, {"HX-Redirect": url_for("console.login")})
    return redirect(url_for("console.login"))


def _show(complaint: str = "", status: int = 200) -> Response:
    return make_response(render_template("login.html", complaint=complaint), status)


def _enter() -> AnyResponse:
    try:
        caller = services().authenticator(request.form.get("api_key", "").strip())
    except RequestError as error:
        return _show(str(error), error.status)
    if caller.token_ends is not None:
        return _show("this is a token, not an API key: log in with the key itself", 401)
    session.clear()
    session.permanent = True
    session[_KEY] = caller.key_id
    return redirect(url_for("console.runs"))


def _leave() -> AnyResponse:
    session.clear()
    return redirect(url_for("console.login"))

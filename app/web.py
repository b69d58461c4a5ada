"""Assembles the Flask application from settings, services and routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from flask import Blueprint, Flask, redirect

from app.api import (
    account,
    checkpoints,
    client,
    docs,
    errors,
    futures,
    hub,
    models,
    sampling,
    sessions,
    training,
    uploads,
)
from app.api.base import EXTENSION, SETTINGS, WholeRequest, add_hooks
from app.api.chat import anthropic, captures, openai
from app.console import login, pages
from app.services import container
from app.settings import Settings

# Endpoints that need no key, and blueprints in which no endpoint needs one.
PUBLIC = frozenset(
    {
        "client.healthz",
        "operations.readyz",
        "operations.metrics",
        "objects.get_object",
        "uploads.put_file",
        "archives.get_archive",
        "archives.get_public_archive",
        "hub",
        "sessions.get_trace",
        "api-docs.openapi_json",
        "docs",
        # Its pages have a login.
        "console",
        "root",
    }
)

_BLUEPRINTS = (
    client.client_blueprint,
    account.auth_blueprint,
    sessions.blueprint,
    models.blueprint,
    training.training_blueprint,
    training.custom_losses_blueprint,
    training.weights_blueprint,
    futures.futures_blueprint,
    futures.queue_blueprint,
    sampling.blueprint,
    checkpoints.runs_blueprint,
    checkpoints.checkpoints_blueprint,
    checkpoints.objects_blueprint,
    checkpoints.archives_blueprint,
    uploads.blueprint,
    account.limits_blueprint,
    openai.blueprint,
    anthropic.blueprint,
    captures.blueprint,
    account.audit_blueprint,
    account.billing_blueprint,
    hub.blueprint,
    client.operations_blueprint,
)


class _Application(Flask):
    request_class = WholeRequest

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """No function here is a coroutine. Flask would look at five of them for each request."""
        return func


def build(settings: Settings) -> Flask:
    """Builds the application. Raises SetupError when the settings cannot work."""
    app = _Application("app", static_folder=None)
    app.config[SETTINGS] = settings
    app.config["MAX_CONTENT_LENGTH"] = min(settings.limits.small_body_bytes, settings.api.max_body_bytes)
    app.extensions[EXTENSION] = container.build(settings)
    add_hooks(app, PUBLIC)
    errors.register(app)
    _add_routes(app)
    login.configure(app, settings)
    app.register_blueprint(pages.blueprint)
    app.add_url_rule("/", "root", lambda: redirect(str(pages.blueprint.url_prefix)))  # for browsers
    return app


def openapi() -> dict[str, Any]:
    """The OpenAPI document. It is the same for all settings."""
    return _add_routes(Flask("app", static_folder=None)).document()


def _add_routes(app: Flask) -> errors.TinsmithApi:
    app.config.update(API_TITLE="Tinsmith", API_VERSION="v1", OPENAPI_VERSION="3.0.3", OPENAPI_URL_PREFIX="/")
    app.config["API_SPEC_OPTIONS"] = docs.OPTIONS
    app.register_blueprint(docs.blueprint)
    api = errors.TinsmithApi(app)
    with app.app_context():
        for blueprint in _BLUEPRINTS:
            api.register_blueprint(blueprint)
    # Not by the Api: its document describes each route once.
    earlier = cast(Blueprint, anthropic.blueprint)
    app.register_blueprint(earlier, name="anthropic_earlier", url_prefix=anthropic.EARLIER_PREFIX)
    return api

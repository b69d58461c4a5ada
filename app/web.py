"""The Flask application: settings, services, hooks and routes put together."""

from __future__ import annotations

import time

from flask import Flask, Response, g, request

from app import routes
from app.auth import authenticate
from app.routes import errors
from app.routes.context import EXTENSION
from app.services import container
from app.settings import Settings
from app.telemetry import REQUEST_SECONDS

# Endpoints, and blueprints all of whose endpoints are.
_PUBLIC = frozenset(
    {
        "client.healthz",
        "operations.readyz",
        "operations.metrics",
        "objects.get_object",
        "hub",
        "api-docs.openapi_json",
        "docs",
    }
)


def build(settings: Settings) -> Flask:
    """Raises SetupError when the settings can not work."""
    app = Flask("app", static_folder=None)
    app.config.update(
        MAX_CONTENT_LENGTH=settings.api.max_body_bytes,
        API_TITLE="Tinsmith",
        API_VERSION="v1",
        OPENAPI_VERSION="3.0.3",
        OPENAPI_URL_PREFIX="/",
    )
    app.extensions[EXTENSION] = container.build(settings)
    _add_hooks(app, settings)
    errors.register(app)
    with app.app_context():
        routes.register(errors.TinsmithApi(app))
    return app


def _add_hooks(app: Flask, settings: Settings) -> None:
    @app.before_request
    def identify() -> None:
        g.started = time.perf_counter()
        if _PUBLIC.isdisjoint((request.endpoint, request.blueprint)):
            g.caller = authenticate(request.headers, settings.api_keys)

    @app.after_request
    def measure(response: Response) -> Response:
        route = request.url_rule.rule if request.url_rule else "unknown"
        REQUEST_SECONDS.labels(route, response.status_code).observe(time.perf_counter() - g.started)
        return response

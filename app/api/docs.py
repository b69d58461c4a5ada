"""The page at /docs: Swagger UI on openapi.json, with every file from this server.

It tries calls with the key that the reader enters. The key is sent only to this server and is not stored.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, send_from_directory
from swagger_ui_bundle import swagger_ui_path
from werkzeug.exceptions import NotFound

blueprint = Blueprint("docs", __name__, url_prefix="/docs")

GROUPS = {
    "Start": "The first calls of a client: whether the server answers, its models, and the options of the SDK.",
    "Sessions": "A session holds the models and samplers of one client, and ends with it.",
    "Training": "Create a model, add gradients and take steps. A call returns a request_id at once; "
    "retrieve_future waits for its result.",
    "Weights": "Save a model's weights as a checkpoint, load them, or export them as files.",
    "Sampling": "Sample tokens from a base model or a checkpoint.",
    "Futures": "Wait for results by request_id, cancel samples, and list the waiting calls.",
    "Checkpoints": "List, search, publish, copy and delete training runs and their checkpoints.",
    "Downloads and uploads": "Files of checkpoints, most of them behind signed URLs, and adapters trained elsewhere.",
    "Account": "The caller's key, its limits, and the usage and audit log of its projects.",
    "OpenAI": "Completions and chats for OpenAI's clients.",
    "Anthropic": "Messages for Anthropic's clients. The same routes are also below /anthropic/v1.",
    "Tokenizers": "Files of tokenizers for clients that have HF_ENDPOINT set to this server.",
    "Operations": "Readiness and metrics for operators. They need no key.",
}
"""The groups of routes, in the page's order."""

KEY = {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "An API key, or a token made from one."}
OPTIONS: dict[str, Any] = {
    "tags": [{"name": name, "description": text} for name, text in GROUPS.items()],
    "security": [{"key": []}],
    "components": {"securitySchemes": {"key": KEY}},
    "info": {
        "description": "To try a call, enter a key under **Authorize**, and replace the ids of an example with those "
        "of your own calls. `tinsmith up` writes a key into the file `api-key` of its data folder."
    },
}
"""Parts of the OpenAPI document that belong to no route."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Tinsmith API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon-32x32.png">
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
# By default a server of Swagger's validates the document; null turns that off.
_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  defaultModelsExpandDepth: -1,
  displayRequestDuration: true,
  docExpansion: "none",
  tryItOutEnabled: true,
  validatorUrl: null,
});
"""
_ASSETS = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
# Swagger UI sets styles of elements, and has its icons in its styles as data.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ASSET_AGE_S = 3600


@blueprint.get("")
def page() -> Response:
    """The page."""
    return Response(_PAGE, mimetype="text/html", headers={"Content-Security-Policy": _POLICY})


@blueprint.get("/start.js")
def start() -> Response:
    """The script that opens Swagger UI. It is a file, because the page's policy lets no inline script run."""
    return Response(_START, mimetype="text/javascript")


@blueprint.get("/<name>")
def asset(name: str) -> Response:
    """A file of Swagger UI that the page loads. Raises NotFound for any other."""
    if name not in _ASSETS:
        raise NotFound
    return send_from_directory(swagger_ui_path, name, max_age=_ASSET_AGE_S)

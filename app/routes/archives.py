"""Checkpoint archives, which SDKs up to 0.34 download; the signature in the URL is the permission."""

from __future__ import annotations

from typing import Any

from flask import Response
from werkzeug.http import http_date

from app.auth import current_caller
from app.ids import TinkerPath
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.checkpoints import SignedUrl

blueprint = make("archives", "Checkpoint archives")


@blueprint.route("/training_runs/<run>/checkpoints/<kind>/<name>/archive", methods=["GET"])
@blueprint.response(302, description="Location is the archive, until Expires")
def get_checkpoint_archive(run: str, kind: str, name: str) -> Response:
    """Where to download a checkpoint's files as one tar."""
    url, expires = services().archives.url(TinkerPath.parse(f"tinker://{run}/{kind}/{name}"), current_caller())
    return Response(status=302, headers={"Location": url, "Expires": http_date(expires)})


@blueprint.route("/archives/<path:prefix>", methods=["GET"])
@blueprint.arguments(SignedUrl(), location="query")
@blueprint.response(200, description="The tar", content_type="application/x-tar")
def get_archive(asked: dict[str, Any], prefix: str) -> Response:
    """An archive behind a signed URL."""
    archive = services().archives.open(prefix, asked["expires"], asked["signature"])
    return Response(archive.chunks, mimetype="application/x-tar", headers={"Content-Length": str(archive.size)})

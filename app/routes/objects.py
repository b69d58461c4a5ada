"""Downloads from the folder store: the signature in the URL is the permission."""

from __future__ import annotations

from typing import Any

from flask import Response, send_file

from app.errors import NotFound
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.checkpoints import SignedUrl
from app.stores.objects import FolderStore

blueprint = make("objects", "Downloads")


@blueprint.route("/objects/<path:key>", methods=["GET"])
@blueprint.arguments(SignedUrl(), location="query")
@blueprint.response(200, description="The file", content_type="application/octet-stream")
def get_object(asked: dict[str, Any], key: str) -> Response:
    """A file behind a signed URL."""
    store = services().objects
    if not isinstance(store, FolderStore):
        raise NotFound(f"object {key[:200]!r} does not exist")
    path = store.open_signed(key, asked["expires"], asked["signature"])
    return send_file(path, mimetype="application/octet-stream")

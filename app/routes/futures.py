"""Polls."""

from __future__ import annotations

from typing import Any

from flask import Response

from app.auth import current_owner
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.futures import RetrieveFuture, TryAgain

blueprint = make("futures", "Futures")


@blueprint.route("/retrieve_future", methods=["POST"])
@blueprint.arguments(RetrieveFuture())
@blueprint.response(200, description="The result, as the worker stored it: protobuf for forward_backward and sample")
@blueprint.alt_response(408, schema=TryAgain, description="Not ready within the hold: poll again at once")
def retrieve_future(asked: dict[str, Any]) -> Response | tuple[dict[str, str], int]:
    """Wait for a future's result."""
    future = services().polls.wait(asked["request_id"], current_owner())
    if future.result is None:
        return {"type": "try_again", "request_id": future.request_id, "queue_state": "active"}, 408
    return Response(future.result.body, content_type=future.result.content_type)

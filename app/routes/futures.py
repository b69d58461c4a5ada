"""Polls."""

from __future__ import annotations

from typing import Any

from flask import Response, request

from app.auth import current_caller, needs
from app.domain.results import JSON, PROTOBUF
from app.routes.bodies import large
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.futures import CancelFuture, CompletedFutures, RetrieveFuture, RetrieveFutures, TryAgain
from app.stores.interfaces import Completion
from app.wire import json_results

blueprint = make("futures", "Futures")


@blueprint.route("/retrieve_future", methods=["POST"])
@blueprint.arguments(RetrieveFuture())
@blueprint.response(
    200,
    description="The result, as the worker stored it: protobuf for forward_backward and sample, or JSON for whoever "
    "would rather have that",
)
@blueprint.alt_response(408, schema=TryAgain, description="Not ready within the hold: poll again at once")
def retrieve_future(asked: dict[str, Any]) -> Response | tuple[dict[str, str], int]:
    """Wait for a future's result."""
    future = services().polls.wait(asked["request_id"], current_caller())
    if future.result is None:
        state = services().queue_states.of(future)
        reason = {"queue_state_reason": state.reason} if state.reason else {}
        return {"type": "try_again", "request_id": future.request_id, "queue_state": state.name, **reason}, 408
    if future.result.content_type == PROTOBUF and _prefers_json():
        return Response(json_results.translate(future.kind, future.result.body), content_type=JSON)
    return Response(future.result.body, content_type=future.result.content_type)


@blueprint.route("/retrieve_futures", methods=["POST"])
@large
@blueprint.arguments(RetrieveFutures())
@blueprint.response(200, CompletedFutures)
def retrieve_futures(asked: dict[str, Any]) -> dict[str, Any]:
    """Wait for any of a client's samples; what it tells of is then fetched with retrieve_future."""
    found, cursor = services().batch_polls.wait(current_caller(), asked)
    return {"completions": [_dump(completion) for completion in found], "cursor": cursor}


@blueprint.route("/cancel_future", methods=["POST"])
@needs("sample")
@blueprint.arguments(CancelFuture())
@blueprint.response(200)
def cancel_future(asked: dict[str, Any]) -> dict[str, str]:
    """Stop a sample that nobody waits for any more."""
    services().cancels.cancel(asked["request_id"], current_caller())
    return {}


def _prefers_json() -> bool:
    """SDKs up to 0.17 do; later ones name protobuf first, and no word on it means that anything will do."""
    return request.accept_mimetypes.best_match([PROTOBUF, JSON], default=PROTOBUF) == JSON


def _dump(completion: Completion) -> dict[str, Any]:
    if completion.failed:
        return {"state": "failed", "request_id": completion.request_id}
    size = {"response_payload_uncompressed_size": completion.size}
    return {"state": "finished", "request_id": completion.request_id, **size}

"""Futures: polls that return their results, cancels, and the queue of waiting calls."""

from __future__ import annotations

from typing import Any

from flask import Response, request
from marshmallow import RAISE, Schema, fields, validate

from app.api.base import current_caller, large, make_blueprint, needs, services, suspended, suspension, trace_poll
from app.api.examples import RETRIEVE_FUTURE, TRY_AGAIN
from app.api.schemas import Cursor, FirstWrong, Paged, SdkSchema, identifier
from app.domain.results import JSON, PROTOBUF
from app.services.views import Page
from app.stores.redis.types import Completion
from app.wire import results

futures_blueprint = make_blueprint("futures", "Futures")

_MOST_RETRIEVED = 100_000

queue_blueprint = make_blueprint("queue", "Futures", parameters={"request_id": "the request_id of a sampling request"})


class RetrieveFuture(SdkSchema):
    request_id = identifier()


class TryAgain(SdkSchema):
    type = fields.String()
    request_id = fields.String()
    queue_state = fields.String()
    queue_state_reason = fields.String()


@futures_blueprint.route("/retrieve_future", methods=["POST"])
@futures_blueprint.arguments(RetrieveFuture(), example=RETRIEVE_FUTURE.request)
@futures_blueprint.response(
    200,
    description="The stored result: protobuf for forward_backward and sample, or JSON if Accept asks for it",
    example=RETRIEVE_FUTURE.response,
)
@futures_blueprint.alt_response(
    408, schema=TryAgain, example=TRY_AGAIN, description="The result is not ready yet: poll again at once"
)
def retrieve_future(asked: dict[str, Any]) -> Response | tuple[dict[str, str], int]:
    """Wait for a future's result."""
    future = services().polls.wait(asked["request_id"], current_caller(), suspension())
    if future is None:
        return suspended()
    if future.result is None:
        state = services().queue_states.of(future)
        reason = {"queue_state_reason": state.reason} if state.reason else {}
        return {"type": "try_again", "request_id": future.request_id, "queue_state": state.name, **reason}, 408
    trace_poll(future)
    if future.result.content_type == PROTOBUF and _prefers_json():
        return Response(results.translate(future.kind, future.result.body), content_type=JSON)
    return Response(future.result.body, content_type=future.result.content_type)


class Completed(SdkSchema):
    state = fields.String()
    request_id = fields.String()
    response_payload_uncompressed_size = fields.Integer()


class CompletedFutures(SdkSchema):
    completions = fields.List(fields.Nested(Completed))
    cursor = fields.Integer()


class Target(SdkSchema):
    type = fields.String(load_default="sampling_session", validate=validate.Equal("sampling_session"))
    sampling_session_id = identifier()
    cloned_sampler_id = fields.Integer(strict=True, load_default=0, validate=validate.Range(0, 2**63 - 1))


class RetrieveFutures(SdkSchema):
    target = fields.Nested(Target, required=True)
    prev_cursor = fields.Integer(strict=True, load_default=0, validate=validate.Range(0, 2**53))
    timeout = fields.Float(allow_none=True, validate=validate.Range(0))
    retrieved_request_ids = FirstWrong(
        fields.String(validate=validate.Length(1, 512)),
        _MOST_RETRIEVED,
        load_default=list,
        validate=validate.Length(max=_MOST_RETRIEVED),
    )


@futures_blueprint.route("/retrieve_futures", methods=["POST"])
@needs("sample")
@large
@futures_blueprint.arguments(RetrieveFutures())
@futures_blueprint.response(200, CompletedFutures)
def retrieve_futures(asked: dict[str, Any]) -> Response | dict[str, Any]:
    """Wait for any of a client's samples. The results that it names are then fetched with retrieve_future."""
    ended = services().batch_polls.wait(current_caller(), asked, suspension())
    if ended is None:
        return suspended()
    found, cursor = ended
    return {"completions": [_completed(completion) for completion in found], "cursor": cursor}


class CancelFuture(SdkSchema):
    request_id = identifier()


@futures_blueprint.route("/cancel_future", methods=["POST"])
@needs("sample")
@futures_blueprint.arguments(CancelFuture())
@futures_blueprint.response(200)
def cancel_future(asked: dict[str, Any]) -> dict[str, str]:
    """Stop a sample that nobody waits for any more."""
    services().cancels.cancel(asked["request_id"], current_caller())
    return {}


def _prefers_json() -> bool:
    """True for SDKs up to 0.17. Later SDKs name protobuf first in Accept; without Accept any form is accepted."""
    return request.accept_mimetypes.best_match([PROTOBUF, JSON], default=PROTOBUF) == JSON


def _completed(completion: Completion) -> dict[str, Any]:
    if completion.failed:
        return {"state": "failed", "request_id": completion.request_id}
    return {
        "state": "finished",
        "request_id": completion.request_id,
        "response_payload_uncompressed_size": completion.size,
    }


class Promise(SdkSchema):
    """A future: the answer of a call, with the request_id by which a poll returns the result later."""

    request_id = fields.String()
    model_id = fields.String()


class SamplePromise(SdkSchema):
    request_id = fields.String()
    sample_sequence_ids = fields.List(fields.String())


class AskedQueue(Paged):
    """A query for the queue. Only this server has this route, so an unknown field is an error."""

    class Meta:
        unknown = RAISE


class WaitingCall(Schema):
    request_id = fields.String()
    kind = fields.String(metadata={"description": "kind of the call: create_model, forward_backward, ..., sample"})
    model_id = fields.String(metadata={"description": "the model of a training call"})
    sampling_session_id = fields.String(metadata={"description": "the sampling session of a sampling request"})
    seq_id = fields.Integer()
    waited_s = fields.Float(metadata={"description": "seconds since the call was admitted"})
    state = fields.String(metadata={"description": "running, waiting, or paused_capacity: no worker can run it now"})
    position = fields.Integer(metadata={"description": "position in the queue at this moment; 1 runs next"})
    estimated_start_s = fields.Float(
        allow_none=True,
        metadata={"description": "estimated seconds until the call starts, from the workers' speed; null if unknown"},
    )
    reason = fields.String(metadata={"description": "the position in words, or the reason why no call runs"})


class Queue(Schema):
    calls = fields.List(fields.Nested(WaitingCall))
    cursor = fields.Nested(Cursor)


@queue_blueprint.route("/queue", methods=["GET"])
@queue_blueprint.arguments(AskedQueue(), location="query")
@queue_blueprint.response(200, Queue)
def get_queue(asked: dict[str, Any]) -> dict[str, Any]:
    """List the waiting and running calls of the caller's projects, with their positions."""
    return services().queue.list(current_caller(), Page(asked["offset"], asked["limit"]))


@queue_blueprint.route("/queue/<request_id>", methods=["DELETE"])
@needs("sample")
@queue_blueprint.response(200)
def leave_queue(request_id: str) -> dict[str, str]:
    """Cancel a sampling request, like cancel_future. Training calls end only when their run is deleted."""
    services().cancels.cancel(request_id, current_caller())
    return {}

"""Creates, keeps alive, finishes, lists, searches and moves sessions, and exports them as traces."""

from __future__ import annotations

from typing import Any

from flask import Response, jsonify
from marshmallow import fields, validate

from app.api.base import current_caller, idempotency_key, make_blueprint, needs, services
from app.api.checkpoints import SearchOwner, SignedUrl
from app.api.examples import CREATE_SESSION
from app.api.schemas import Paged, Scoped, SdkSchema, identifier, label, metadata, nested, page_limit
from app.services.views import Page

blueprint = make_blueprint("sessions", "Sessions", parameters={"session_id": "the session_id of create_session"})

_MOST_TAGS = 64
_NO_REASON = validate.NoneOf(
    ("open", "expired"), error="Is reserved for sessions that have not been finished; give another reason."
)


class CreateSession(SdkSchema):
    """A request for a session."""

    tags = fields.List(
        fields.String(validate=validate.Length(max=512)), load_default=list, validate=validate.Length(max=_MOST_TAGS)
    )
    user_metadata = metadata()
    sdk_version = fields.String()
    project_id = fields.String(allow_none=True, validate=validate.Length(1, 256))
    display_name = label()


class SessionCreated(SdkSchema):
    session_id = fields.String()


@blueprint.route("/create_session", methods=["POST"])
@needs("train", "sample")
@blueprint.arguments(CreateSession(), example=CREATE_SESSION.request)
@blueprint.response(200, SessionCreated, example=CREATE_SESSION.response)
def create_session(asked: dict[str, Any]) -> dict[str, str]:
    """Open a session; a repeat with the same X-Idempotency-Key returns the same session."""
    return {"session_id": services().sessions.create(current_caller(), asked, idempotency_key())}


class Heartbeat(SdkSchema):
    session_id = identifier()


@blueprint.route("/session_heartbeat", methods=["POST"])
@needs("train", "sample")
@blueprint.arguments(Heartbeat())
@blueprint.response(200)
def session_heartbeat(asked: dict[str, Any]) -> dict[str, str]:
    """Keep a session alive."""
    services().sessions.heartbeat(asked["session_id"], current_caller())
    return {}


class FinishReason(SdkSchema):
    type = fields.String(required=True, validate=[validate.Length(1, 64), _NO_REASON])


class FinishSession(SdkSchema):
    reason = fields.Nested(FinishReason, required=True)
    detail = fields.String(allow_none=True)


@blueprint.route("/sessions/<session_id>/finish", methods=["POST"])
@needs("train", "sample")
@blueprint.arguments(FinishSession())
@blueprint.response(200)
def finish_session(asked: dict[str, Any], session_id: str) -> dict[str, str]:
    """Close a session; the first reason stays."""
    reason, detail = asked["reason"]["type"], asked.get("detail") or ""
    services().sessions.finish(session_id, current_caller(), reason, detail)
    return {}


class ListSessions(Paged, Scoped):
    limit = page_limit(20)


class SessionList(SdkSchema):
    sessions = fields.List(fields.String())


@blueprint.route("/sessions", methods=["GET"])
@blueprint.arguments(ListSessions(), location="query")
@blueprint.response(200, SessionList)
def list_sessions(asked: dict[str, Any]) -> dict[str, list[str]]:
    """List sessions, newest first."""
    page = Page(asked["offset"], asked["limit"])
    return {"sessions": services().sessions.list_ids(current_caller(), asked["access_scope"], page)}


class NextCursor(SdkSchema):
    last_created_at = fields.String()
    last_session_id = fields.String()


class SearchCursor(SdkSchema):
    last_created_at = fields.AwareDateTime(required=True)
    last_session_id = fields.String(required=True)


class SearchStatus(SdkSchema):
    type = fields.String(required=True, validate=validate.OneOf(("active", "cancelled", "failed", "client_finished")))
    reasons = fields.List(
        fields.String(validate=validate.OneOf(("success", "errored", "interrupted"))),
        load_default=None,
        allow_none=True,
    )


class SearchSessions(SdkSchema):
    session_id = fields.String(load_default=None, allow_none=True, validate=validate.Length(max=512))
    project_ids = fields.List(fields.String(), load_default=None, allow_none=True, validate=validate.Length(max=1000))
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), load_default=dict)
    # The search compares every session with each word of the name.
    display_name = fields.String(load_default=None, allow_none=True, validate=validate.Length(1, 512))
    owner = nested(SearchOwner)
    statuses = fields.List(
        fields.Nested(SearchStatus), load_default=None, allow_none=True, validate=validate.Length(max=16)
    )
    limit = fields.Integer(strict=True, load_default=50, validate=validate.Range(1, 200))
    cursor = fields.Nested(SearchCursor, load_default=None, allow_none=True)


class SessionSummary(SdkSchema):
    session_id = fields.String()
    created_at = fields.String()
    owner = fields.String()
    project_id = fields.String()
    status = fields.Dict(allow_none=True)
    checkpoints_count = fields.Integer()
    checkpoint_storage_bytes = fields.Integer()
    display_name = fields.String(allow_none=True)
    user_metadata = fields.Dict()


class SessionsFound(SdkSchema):
    sessions = fields.List(fields.Nested(SessionSummary))
    next_cursor = fields.Nested(NextCursor)


@blueprint.route("/sessions/search", methods=["POST"])
@blueprint.arguments(SearchSessions())
@blueprint.response(200, SessionsFound)
def search_sessions(asked: dict[str, Any]) -> dict[str, Any]:
    """Search sessions by name, metadata, status and project, newest first."""
    return services().session_search(current_caller(), asked)


class SessionContent(SdkSchema):
    training_run_ids = fields.List(fields.String())
    sampler_ids = fields.List(fields.String())
    user_metadata = fields.Dict()
    display_name = fields.String(allow_none=True)


@blueprint.route("/sessions/<session_id>", methods=["GET"])
@blueprint.arguments(Scoped(), location="query")
@blueprint.response(200, SessionContent)
def get_session(_: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Return the runs and samplers of a session, newest first."""
    return services().sessions.describe(session_id, current_caller())


class MoveSession(SdkSchema):
    project_id = identifier()


@blueprint.route("/sessions/<session_id>/project", methods=["PUT"])
@needs("manage")
@blueprint.arguments(MoveSession())
@blueprint.response(200)
def move_session(asked: dict[str, Any], session_id: str) -> dict[str, str]:
    """Move a session to another project, with its runs, samplers and checkpoints."""
    services().sessions.move(session_id, current_caller(), asked["project_id"])
    return {}


class TraceExport(SdkSchema):
    status = fields.String()
    url = fields.String()
    error = fields.String()


@blueprint.route("/sessions/<session_id>/trace_export", methods=["GET"])
@blueprint.response(200, TraceExport)
def export_trace(session_id: str) -> dict[str, str]:
    """Return a link to the timeline of a session's calls."""
    return services().traces.export(session_id, current_caller())


@blueprint.route("/sessions/<session_id>/trace", methods=["GET"])
@blueprint.arguments(SignedUrl(), location="query")
@blueprint.doc(security=[])
@blueprint.response(200, description="The trace", content_type="application/json")
def get_trace(asked: dict[str, Any], session_id: str) -> Response:
    """Download the timeline behind a signed link, for ui.perfetto.dev."""
    return jsonify(services().traces.read(session_id, asked["expires"], asked["signature"]))

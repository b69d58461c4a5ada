"""Sessions."""

from __future__ import annotations

from typing import Any

from flask import Response, jsonify

from app.auth import current_caller, needs
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.checkpoints import SignedUrl
from app.schemas.lists import Scoped
from app.schemas.sessions import (
    CreateSession,
    FinishSession,
    Heartbeat,
    ListSessions,
    MoveSession,
    SearchSessions,
    SessionContent,
    SessionCreated,
    SessionList,
    SessionsFound,
    TraceExport,
)
from app.services.lists import Page

blueprint = make("sessions", "Sessions")


@blueprint.route("/create_session", methods=["POST"])
@needs("train", "sample")
@blueprint.arguments(CreateSession())
@blueprint.response(200, SessionCreated)
def create_session(asked: dict[str, Any]) -> dict[str, str]:
    """Open a session."""
    return {"session_id": services().sessions.create(current_caller(), asked)}


@blueprint.route("/session_heartbeat", methods=["POST"])
@needs("train", "sample")
@blueprint.arguments(Heartbeat())
@blueprint.response(200)
def session_heartbeat(asked: dict[str, Any]) -> dict[str, str]:
    """Say that the client is still there."""
    services().sessions.heartbeat(asked["session_id"], current_caller())
    return {}


@blueprint.route("/sessions/<session_id>/finish", methods=["POST"])
@needs("train", "sample")
@blueprint.arguments(FinishSession())
@blueprint.response(200)
def finish_session(asked: dict[str, Any], session_id: str) -> dict[str, str]:
    """Close a session; the first reason stays."""
    services().sessions.finish(session_id, current_caller(), asked["reason"]["type"])
    return {}


@blueprint.route("/sessions", methods=["GET"])
@blueprint.arguments(ListSessions(), location="query")
@blueprint.response(200, SessionList)
def list_sessions(asked: dict[str, Any]) -> dict[str, list[str]]:
    """Sessions, newest first."""
    page = Page(asked["offset"], asked["limit"])
    return {"sessions": services().sessions.list_ids(current_caller(), asked["access_scope"], page)}


@blueprint.route("/sessions/search", methods=["POST"])
@blueprint.arguments(SearchSessions())
@blueprint.response(200, SessionsFound)
def search_sessions(asked: dict[str, Any]) -> dict[str, Any]:
    """Sessions by name, metadata, status and project, newest first."""
    return services().session_search(current_caller(), asked)


@blueprint.route("/sessions/<session_id>", methods=["GET"])
@blueprint.arguments(Scoped(), location="query")
@blueprint.response(200, SessionContent)
def get_session(_: dict[str, Any], session_id: str) -> dict[str, Any]:
    """The runs and samplers of a session."""
    return services().sessions.describe(session_id, current_caller())


@blueprint.route("/sessions/<session_id>/project", methods=["PUT"])
@needs("manage")
@blueprint.arguments(MoveSession())
@blueprint.response(200)
def move_session(asked: dict[str, Any], session_id: str) -> dict[str, str]:
    """Give a session to another project, with its runs, samplers and checkpoints."""
    services().sessions.move(session_id, current_caller(), asked["project_id"])
    return {}


@blueprint.route("/sessions/<session_id>/trace_export", methods=["GET"])
@blueprint.response(200, TraceExport)
def export_trace(session_id: str) -> dict[str, str]:
    """A link to the timeline of a session's calls."""
    return services().traces.export(session_id, current_caller())


@blueprint.route("/sessions/<session_id>/trace", methods=["GET"])
@blueprint.arguments(SignedUrl(), location="query")
@blueprint.response(200, description="The trace", content_type="application/json")
def get_trace(asked: dict[str, Any], session_id: str) -> Response:
    """The timeline behind a signed link, for ui.perfetto.dev."""
    return jsonify(services().traces.read(session_id, asked["expires"], asked["signature"]))

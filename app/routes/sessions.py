"""Sessions."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.sessions import CreateSession, FinishSession, Heartbeat, SessionCreated

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

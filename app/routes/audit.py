"""The audit log, for admins of projects."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.audit import AuditAsked, AuditLog

blueprint = make("audit", "Audit log")


@blueprint.route("/audit", methods=["GET"])
@blueprint.arguments(AuditAsked(), location="query")
@blueprint.response(200, AuditLog)
def get_audit_log(asked: dict[str, Any]) -> dict[str, Any]:
    """What was done in a day in the projects where the caller is an admin, oldest first."""
    return {"entries": services().audit.read(current_caller(), asked["event_type"], asked["day"])}

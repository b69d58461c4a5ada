"""What the caller's project and key may take."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.limits import LimitsAsked, LimitsShown

blueprint = make("limits", "Limits")


@blueprint.route("/limits", methods=["GET"])
@blueprint.arguments(LimitsAsked(), location="query")
@blueprint.response(200, LimitsShown)
def get_limits(asked: dict[str, Any]) -> dict[str, Any]:
    """What holds for a project and for the key, and what is used of it now."""
    return services().allowances.describe(current_caller(), asked.get("project_id"))

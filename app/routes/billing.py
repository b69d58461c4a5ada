"""Usage and storage, for admins of projects."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.billing import Storage, StorageAsked, UsageAsked, UsageEvents

blueprint = make("billing", "Usage")


@blueprint.route("/billing/usage/events", methods=["GET"])
@blueprint.arguments(UsageAsked(), location="query")
@blueprint.response(200, UsageEvents)
def get_usage_events(asked: dict[str, Any]) -> dict[str, Any]:
    """What was used in each hour of a window, in the projects where the caller is an admin."""
    return services().usage.events(current_caller(), asked["starting_on"], asked["ending_before"])


@blueprint.route("/billing/usage/checkpoints/current", methods=["GET"])
@blueprint.arguments(StorageAsked(), location="query")
@blueprint.response(200, Storage)
def get_current_storage(asked: dict[str, Any]) -> dict[str, Any]:
    """The checkpoints there are, in number and size, of the projects where the caller is an admin, or of one."""
    return {"data": services().usage.stored(current_caller(), asked["project_id"])}

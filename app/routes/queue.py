"""What waits, and calling one off."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.queue import AskedQueue, Queue
from app.services.lists import Page

blueprint = make("queue", "The queue")


@blueprint.route("/queue", methods=["GET"])
@blueprint.arguments(AskedQueue(), location="query")
@blueprint.response(200, Queue)
def get_queue(asked: dict[str, Any]) -> dict[str, Any]:
    """The calls of one's projects that wait or run, each with its place."""
    return services().queue.list(current_caller(), Page(asked["offset"], asked["limit"]))


@blueprint.route("/queue/<request_id>", methods=["DELETE"])
@needs("sample")
@blueprint.response(200)
def leave_queue(request_id: str) -> dict[str, str]:
    """Stop a sample, as cancel_future does. Calls that train run in their order; deleting their run ends them."""
    services().cancels.cancel(request_id, current_caller())
    return {}

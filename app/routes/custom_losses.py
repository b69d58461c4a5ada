"""Custom losses that run on the server."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.bodies import at_most
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.custom_losses import CreateCustomLoss
from app.schemas.futures import Promise

blueprint = make("custom_losses", "Custom losses")
# The JSON of a loss is about twice what the journal holds of it (MAX_BYTES of app/wire/custom_loss.py).
_MAX_BODY = 512 * 1024


@blueprint.route("/create_custom_loss", methods=["POST"])
@needs("train")
@at_most(_MAX_BODY)
@blueprint.arguments(CreateCustomLoss())
@blueprint.response(200, Promise)
def create_custom_loss(asked: dict[str, Any]) -> dict[str, str]:
    """A loss function by its traced graph, to be named in forward_backward calls."""
    return services().custom_losses.create(current_caller(), asked)

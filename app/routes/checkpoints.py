"""Checkpoints by their path: all of a caller's, what they hold, copies."""

from __future__ import annotations

from typing import Any

from flask import request

from app.auth import current_caller, needs
from app.ids import TinkerPath
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.checkpoints import CheckpointPage, CopyWeights, WeightsCopied, WeightsInfo, WeightsInfoAsked
from app.schemas.lists import Paged
from app.services.lists import Page

blueprint = make("checkpoints", "Checkpoints of all runs")


@blueprint.route("/checkpoints", methods=["GET"])
@blueprint.arguments(Paged(), location="query")
@blueprint.response(200, CheckpointPage)
def list_all_checkpoints(asked: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints of all runs, newest first."""
    return services().checkpoints.list_all(current_caller(), Page(asked["offset"], asked["limit"]))


@blueprint.route("/weights_info", methods=["POST"])
@blueprint.arguments(WeightsInfoAsked())
@blueprint.response(200, WeightsInfo)
def weights_info(asked: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds, and what a model must be to load it."""
    return services().checkpoints.describe_weights(TinkerPath.parse(asked["tinker_path"]), current_caller())


@blueprint.route("/copy_weights", methods=["POST"])
@needs("manage")
@blueprint.arguments(CopyWeights())
@blueprint.response(200, WeightsCopied)
def copy_weights(asked: dict[str, Any]) -> dict[str, str]:
    """Copy a checkpoint into a project or a session; again under the same X-Idempotency-Key it is the same copy."""
    key = request.headers.get("X-Idempotency-Key")
    token = request.headers.get("X-Tinker-Weights-Access-Token", asked["weights_access_token"])
    return {"tinker_path": services().copies.copy(current_caller(), asked, key, token)}

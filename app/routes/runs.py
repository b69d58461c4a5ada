"""Training runs and their checkpoints. A checkpoint's id is `<kind>/<name>`, with its slash, in the path."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.ids import TinkerPath
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.checkpoints import CheckpointList, ExternalUrls, SetTtl, TrainingRun

blueprint = make("runs", "Training runs and checkpoints")
_CHECKPOINT = "/training_runs/<run>/checkpoints/<kind>/<name>"


@blueprint.route("/training_runs/<run>", methods=["GET"])
@blueprint.response(200, TrainingRun)
def get_training_run(run: str) -> dict[str, Any]:
    """A run and its newest checkpoints."""
    return services().checkpoints.describe_run(run, current_caller())


@blueprint.route("/training_runs/<run>", methods=["DELETE"])
@needs("manage")
@blueprint.response(200)
def delete_training_run(run: str) -> dict[str, str]:
    """End a run: its waiting calls fail and nothing is left of it but its saved checkpoints."""
    services().models.delete(run, current_caller())
    return {}


@blueprint.route("/training_runs/<run>/checkpoints", methods=["GET"])
@blueprint.response(200, CheckpointList)
def list_checkpoints(run: str) -> dict[str, Any]:
    """A run's checkpoints, newest first."""
    return {"checkpoints": services().checkpoints.list_run(run, current_caller())}


@blueprint.route(f"{_CHECKPOINT}/ttl", methods=["PUT"])
@needs("manage")
@blueprint.arguments(SetTtl())
@blueprint.response(200)
def set_checkpoint_ttl(asked: dict[str, Any], run: str, kind: str, name: str) -> dict[str, str]:
    """Let a checkpoint expire that many seconds from now, or never."""
    services().checkpoints.set_ttl(_path(run, kind, name), current_caller(), asked["ttl_seconds"])
    return {}


@blueprint.route(_CHECKPOINT, methods=["DELETE"])
@needs("manage")
@blueprint.response(200)
def delete_checkpoint(run: str, kind: str, name: str) -> dict[str, str]:
    """Delete a checkpoint and its files."""
    services().checkpoints.delete(_path(run, kind, name), current_caller())
    return {}


@blueprint.route(f"{_CHECKPOINT}/external_weights_urls", methods=["GET"])
@blueprint.response(200, ExternalUrls)
def get_external_weights_urls(run: str, kind: str, name: str) -> dict[str, Any]:
    """Signed download URLs of an external checkpoint's files."""
    return services().checkpoints.urls(_path(run, kind, name), current_caller())


def _path(run: str, kind: str, name: str) -> TinkerPath:
    return TinkerPath.parse(f"tinker://{run}/{kind}/{name}")

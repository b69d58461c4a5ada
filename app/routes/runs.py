"""Training runs and their checkpoints. A checkpoint's id is `<kind>/<name>`, with its slash, in the path."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.ids import TinkerPath
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.checkpoints import (
    CheckpointList,
    ExternalUrls,
    ListTrainingRuns,
    SetTtl,
    TrainingRun,
    TrainingRunPage,
)
from app.schemas.lists import Scoped
from app.services.lists import Page

blueprint = make("runs", "Training runs and checkpoints")
_CHECKPOINT = "/training_runs/<run>/checkpoints/<kind>/<name>"


@blueprint.route("/training_runs", methods=["GET"])
@blueprint.arguments(ListTrainingRuns(), location="query")
@blueprint.response(200, TrainingRunPage)
def list_training_runs(asked: dict[str, Any]) -> dict[str, Any]:
    """Runs, newest first."""
    page = Page(asked["offset"], asked["limit"])
    return services().runs.list_runs(current_caller(), asked["access_scope"], asked.get("project_id"), page)


@blueprint.route("/training_runs/<run>", methods=["GET"])
@blueprint.arguments(Scoped(), location="query")
@blueprint.response(200, TrainingRun)
def get_training_run(asked: dict[str, Any], run: str) -> dict[str, Any]:
    """A run and its newest checkpoints; with access_scope accessible also one that published a checkpoint."""
    return services().runs.describe(run, current_caller(), asked["access_scope"])


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
    """A run's checkpoints, newest first; of somebody else's run the public ones."""
    return {"checkpoints": services().runs.list_checkpoints(run, current_caller())}


@blueprint.route(f"{_CHECKPOINT}/publish", methods=["POST"])
@needs("manage")
@blueprint.response(200)
def publish_checkpoint(run: str, kind: str, name: str) -> dict[str, str]:
    """Let everybody with a key read a checkpoint, and what its run is."""
    services().checkpoints.publish(_path(run, kind, name), current_caller(), public=True)
    return {}


@blueprint.route(f"{_CHECKPOINT}/publish", methods=["DELETE"])
@needs("manage")
@blueprint.response(200)
def unpublish_checkpoint(run: str, kind: str, name: str) -> dict[str, str]:
    """Let nobody else read a checkpoint any more."""
    services().checkpoints.publish(_path(run, kind, name), current_caller(), public=False)
    return {}


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

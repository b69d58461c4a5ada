"""Models: made and described."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.futures import Promise
from app.schemas.models import CreateModel, GetInfo, ModelInfo, UnloadModel

blueprint = make("models", "Models")


@blueprint.route("/create_model", methods=["POST"])
@needs("train")
@blueprint.arguments(CreateModel())
@blueprint.response(200, Promise)
def create_model(asked: dict[str, Any]) -> dict[str, str]:
    """A fresh LoRA adapter on a base model; with `lora_config` null all of its weights are trained."""
    return services().models.create(current_caller(), asked)


@blueprint.route("/get_info", methods=["POST"])
@blueprint.arguments(GetInfo())
@blueprint.response(200, ModelInfo)
def get_info(asked: dict[str, Any]) -> dict[str, Any]:
    """What a model is and which tokenizer it takes."""
    return services().models.describe(asked["model_id"], current_caller())


@blueprint.route("/unload_model", methods=["POST"])
@needs("train")
@blueprint.arguments(UnloadModel())
@blueprint.response(200, Promise)
def unload_model(asked: dict[str, Any]) -> dict[str, str]:
    """Let a model leave its trainer's memory, as SDKs up to 0.24 ask for; the next call brings it back."""
    return services().models.unload(asked["model_id"], current_caller())

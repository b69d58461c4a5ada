"""Saving and loading weights."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.context import blueprint as make
from app.routes.context import services
from app.routes.seqs import consumes_seq
from app.schemas.futures import Promise
from app.schemas.weights import LoadWeights, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler

blueprint = make("weights", "Weights")


@blueprint.route("/save_weights", methods=["POST"])
@needs("train")
@consumes_seq()
@blueprint.arguments(SaveWeights())
@blueprint.response(200, Promise)
def save_weights(asked: dict[str, Any]) -> dict[str, str]:
    """A training checkpoint: weights and optimizer state."""
    return services().training.save_weights(current_caller(), asked)


@blueprint.route("/save_weights_for_sampler", methods=["POST"])
@needs("train")
@consumes_seq()
@blueprint.arguments(SaveWeightsForSampler())
@blueprint.response(200, Promise)
def save_weights_for_sampler(asked: dict[str, Any]) -> dict[str, str]:
    """Weights to sample from, kept under a path or for one sampling session."""
    return services().training.save_weights_for_sampler(current_caller(), asked)


@blueprint.route("/save_weights_external", methods=["POST"])
@needs("train")
@consumes_seq()
@blueprint.arguments(SaveWeightsExternal())
@blueprint.response(200, Promise)
def save_weights_external(asked: dict[str, Any]) -> dict[str, str]:
    """Files to download: PEFT, or the merged model."""
    return services().training.save_weights_external(current_caller(), asked)


@blueprint.route("/load_weights", methods=["POST"])
@needs("train")
@consumes_seq()
@blueprint.arguments(LoadWeights())
@blueprint.response(200, Promise)
def load_weights(asked: dict[str, Any]) -> dict[str, str]:
    """Load a checkpoint into a model, or make a new model from one."""
    if asked.get("model_id") is not None:
        return services().training.load_weights(current_caller(), asked)
    return services().models.create_from(current_caller(), asked)

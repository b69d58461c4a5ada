"""Creates, describes and unloads models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marshmallow import RAISE, fields, pre_load, validate

from app.api.base import current_caller, make_blueprint, needs, services
from app.api.examples import CREATE_MODEL
from app.api.futures import Promise
from app.api.schemas import SdkSchema, counter, identifier, metadata, nested
from app.ids import MAX_NUMBER

blueprint = make_blueprint("models", "Training")


class Hyperparameters(SdkSchema):
    """Values that decide what a model learns. An unknown one is refused, because without it the model would learn
    something else. A null, false, zero or empty one is ignored: a later SDK may send such a default in every call."""

    class Meta:
        unknown = RAISE

    error_messages = {  # noqa: RUF012 (marshmallow declares it for instances)
        "unknown": "This server does not know this field: correct its name, or leave it out."
    }

    @pre_load
    def leave_out_defaults(self, data: Any, **_: Any) -> Any:
        known = self.fields
        return {name: data[name] for name in data if name in known or data[name]} if isinstance(data, Mapping) else data


class LoraConfig(Hyperparameters):
    """The LoRA settings of a model."""

    rank = fields.Integer(strict=True, load_default=32)
    train_unembed = fields.Boolean(load_default=True)
    train_mlp = fields.Boolean(load_default=True)
    train_attn = fields.Boolean(load_default=True)
    seed = fields.Integer(strict=True, validate=validate.Range(0, 2**63 - 1))


def model_role() -> fields.String:
    """The role of a model. The SDK has no argument for it, so it comes in user_metadata."""
    return fields.String(allow_none=True, metadata={"description": "policy, the default, or critic"})


class CreateModel(SdkSchema):
    session_id = identifier()
    model_seq_id = counter(0, MAX_NUMBER)
    base_model = identifier()
    # null, or a rank of 0, asks for full fine-tuning.
    lora_config = nested(LoraConfig, allow_none=True)
    optimizer_config = fields.Dict(keys=fields.String())
    model_role = model_role()
    user_metadata = metadata()


@blueprint.route("/create_model", methods=["POST"])
@needs("train")
@blueprint.arguments(CreateModel(), example=CREATE_MODEL.request)
@blueprint.response(200, Promise, example=CREATE_MODEL.response)
def create_model(asked: dict[str, Any]) -> dict[str, str]:
    """Create a model: a fresh LoRA adapter, or all weights of a base model if lora_config is null."""
    return services().models.create(current_caller(), asked)


class GetInfo(SdkSchema):
    model_id = identifier()


class ModelData(SdkSchema):
    arch = fields.String()
    model_name = fields.String()
    tokenizer_id = fields.String()


class ModelInfo(SdkSchema):
    model_id = fields.String()
    model_data = fields.Nested(ModelData)
    model_name = fields.String()
    is_lora = fields.Boolean()
    lora_rank = fields.Integer()


@blueprint.route("/get_info", methods=["POST"])
@blueprint.arguments(GetInfo())
@blueprint.response(200, ModelInfo)
def get_info(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the base model, the LoRA rank and the tokenizer of a model."""
    return services().models.describe(asked["model_id"], current_caller())


class UnloadModel(SdkSchema):
    model_id = identifier()


@blueprint.route("/unload_model", methods=["POST"])
@needs("train")
@blueprint.arguments(UnloadModel())
@blueprint.response(200, Promise)
def unload_model(asked: dict[str, Any]) -> dict[str, str]:
    """Unload a model from its trainer's memory, for SDKs up to 0.24; the next call restores it."""
    return services().models.unload(asked["model_id"], current_caller())

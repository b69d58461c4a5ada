"""Models: create_model and get_info."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, counter, identifier, metadata


class LoraConfig(SdkSchema):
    rank = fields.Integer(strict=True, load_default=32)
    train_unembed = fields.Boolean(load_default=True)
    train_mlp = fields.Boolean(load_default=True)
    train_attn = fields.Boolean(load_default=True)
    seed = fields.Integer(strict=True, validate=validate.Range(0, 2**63 - 1))


def model_role() -> fields.String:
    """The SDK, which has no such argument, sends it in user_metadata."""
    return fields.String(allow_none=True, metadata={"description": "policy, the default, or critic"})


class CreateModel(SdkSchema):
    session_id = identifier()
    model_seq_id = counter(0, 10**9 - 1)
    base_model = identifier()
    # null, and a rank of 0, ask for all weights to be trained.
    lora_config = fields.Nested(LoraConfig, load_default=lambda: LoraConfig().load({}), allow_none=True)
    optimizer_config = fields.Dict(keys=fields.String())
    model_role = model_role()
    user_metadata = metadata()


class GetInfo(SdkSchema):
    model_id = identifier()


class UnloadModel(SdkSchema):
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

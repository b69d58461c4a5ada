"""Training runs and their checkpoints."""

from __future__ import annotations

from marshmallow import fields

from app.schemas.base import SdkSchema


class Checkpoint(SdkSchema):
    checkpoint_id = fields.String()
    checkpoint_type = fields.String()
    time = fields.String()
    tinker_path = fields.String()
    size_bytes = fields.Integer()
    public = fields.Boolean()
    user_metadata = fields.Dict()
    expires_at = fields.String()


class CheckpointList(SdkSchema):
    checkpoints = fields.List(fields.Nested(Checkpoint))


class TrainingRun(SdkSchema):
    training_run_id = fields.String()
    base_model = fields.String()
    model_owner = fields.String()
    is_lora = fields.Boolean()
    lora_rank = fields.Integer(allow_none=True)
    corrupted = fields.Boolean()
    ended = fields.Boolean()
    last_request_time = fields.String()
    last_checkpoint = fields.Nested(Checkpoint, allow_none=True)
    last_sampler_checkpoint = fields.Nested(Checkpoint, allow_none=True)
    user_metadata = fields.Dict()


class SetTtl(SdkSchema):
    ttl_seconds = fields.Integer(strict=True, allow_none=True, load_default=None)


class ExternalUrls(SdkSchema):
    urls = fields.Dict(keys=fields.String(), values=fields.String())
    expires = fields.String()


class SignedUrl(SdkSchema):
    expires = fields.Integer(required=True)
    signature = fields.String(required=True)

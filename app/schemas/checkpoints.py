"""Training runs and their checkpoints."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, access_token, identifier
from app.schemas.lists import MOST, Cursor, Paged, Scoped


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


class CheckpointPage(CheckpointList):
    cursor = fields.Nested(Cursor)


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


class ListTrainingRuns(Paged, Scoped):
    limit = fields.Integer(load_default=20, validate=validate.Range(1, MOST))
    project_id = fields.String(validate=validate.Length(1, 256))


class TrainingRunPage(SdkSchema):
    training_runs = fields.List(fields.Nested(TrainingRun))
    cursor = fields.Nested(Cursor)


class WeightsInfoAsked(SdkSchema):
    tinker_path = identifier()


class WeightsInfo(SdkSchema):
    base_model = fields.String()
    is_lora = fields.Boolean()
    lora_rank = fields.Integer()
    train_attn = fields.Boolean()
    train_mlp = fields.Boolean()
    train_unembed = fields.Boolean()


class CopyWeights(SdkSchema):
    """Into a project, or as a run of a session (session_id and model_seq_id)."""

    source_path = identifier()
    destination_project_id = fields.String(load_default=None, validate=validate.Length(1, 256))
    session_id = fields.String(load_default=None, validate=validate.Length(1, 512))
    model_seq_id = fields.Integer(strict=True, load_default=None, validate=validate.Range(0, 10**9 - 1))
    ttl_seconds = fields.Integer(strict=True, allow_none=True, load_default=None)
    weights_access_token = access_token(load_default=None)


class WeightsCopied(SdkSchema):
    tinker_path = fields.String()


class SetTtl(SdkSchema):
    ttl_seconds = fields.Integer(strict=True, allow_none=True, load_default=None)


class ExternalUrls(SdkSchema):
    urls = fields.Dict(keys=fields.String(), values=fields.String())
    expires = fields.String()


class SignedUrl(SdkSchema):
    expires = fields.Integer(required=True)
    signature = fields.String(required=True)

"""Saving and loading."""

from __future__ import annotations

from marshmallow import ValidationError, fields, validate, validates_schema

from app.schemas.base import SdkSchema, access_token, check_metadata, counter, identifier, metadata
from app.schemas.models import model_role


class _Save(SdkSchema):
    model_id = identifier()
    seq_id = counter(1)
    ttl_seconds = fields.Integer(strict=True, allow_none=True)
    overwrite = fields.Boolean(load_default=False)
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), allow_none=True, validate=check_metadata)


class SaveWeights(_Save):
    path = identifier()


class SaveWeightsExternal(_Save):
    path = identifier()
    age_encryption_recipients = fields.List(
        fields.String(validate=validate.Length(1, 128)), allow_none=True, validate=validate.Length(max=10)
    )
    format = fields.String(
        allow_none=True,
        metadata={"description": "peft or huggingface; else what the model's user_metadata says as export_format"},
    )


class SaveWeightsForSampler(_Save):
    path = fields.String(allow_none=True)
    sampling_session_seq_id = fields.Integer(strict=True, allow_none=True, validate=validate.Range(0, 10**9))
    kind = fields.String(
        load_default="snapshot",
        validate=validate.OneOf(("snapshot", "inflight")),
        metadata={"description": "snapshot: these weights for ever; inflight: the newest ones saved so"},
    )


class LoadWeights(SdkSchema):
    """Either a model's next Op (model_id, seq_id), or a new model (session_id, model_seq_id)."""

    path = identifier()
    optimizer = fields.Boolean(load_default=False)
    model_id = fields.String()
    seq_id = fields.Integer(strict=True)
    session_id = fields.String()
    model_seq_id = fields.Integer(strict=True)
    base_model = fields.String()
    optimizer_config = fields.Dict(keys=fields.String())
    model_role = model_role()
    user_metadata = metadata()
    weights_access_token = access_token()

    @validates_schema
    def _one_addressing(self, data: dict[str, object], **_: object) -> None:
        model = data.get("model_id") is not None and in_counter(data.get("seq_id"), 1)
        session = data.get("session_id") is not None and in_counter(data.get("model_seq_id"), 0)
        if model == session:
            raise ValidationError("send model_id and seq_id (from 1), or session_id and model_seq_id (from 0)")


def in_counter(value: object, low: int) -> bool:
    return isinstance(value, int) and low <= value < 10**9

"""Sessions."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, identifier, label, metadata

_MOST_TAGS = 64


class CreateSession(SdkSchema):
    tags = fields.List(
        fields.String(validate=validate.Length(max=512)), load_default=list, validate=validate.Length(max=_MOST_TAGS)
    )
    user_metadata = metadata()
    sdk_version = fields.String()
    project_id = fields.String(allow_none=True, validate=validate.Length(1, 256))
    display_name = label()


class SessionCreated(SdkSchema):
    session_id = fields.String()


class Heartbeat(SdkSchema):
    session_id = identifier()


class FinishReason(SdkSchema):
    type = fields.String(required=True, validate=validate.Length(1, 64))


class FinishSession(SdkSchema):
    reason = fields.Nested(FinishReason, required=True)
    detail = fields.String(allow_none=True)

"""Usage, as the SDK's billing methods ask for it. There are no prices here, so what costs stand in is left out."""

from __future__ import annotations

from datetime import UTC

from marshmallow import fields, validate

from app.schemas.base import SdkSchema


class UsageAsked(SdkSchema):
    starting_on = fields.AwareDateTime(required=True, default_timezone=UTC)
    ending_before = fields.AwareDateTime(required=True, default_timezone=UTC)


class UsageEvent(SdkSchema):
    bucket_start = fields.String()
    bucket_end = fields.String()
    base_model = fields.String()
    user_id = fields.String(allow_none=True)
    user_name = fields.String(allow_none=True)
    session_id = fields.String(allow_none=True)
    project_id = fields.String()
    event_info = fields.Dict()


class UsageSession(SdkSchema):
    user_metadata = fields.Dict(allow_none=True)


class UsageEvents(SdkSchema):
    data = fields.List(fields.Nested(UsageEvent))
    sessions = fields.Dict(keys=fields.String(), values=fields.Nested(UsageSession))


class StorageAsked(SdkSchema):
    project_id = fields.String(load_default=None, validate=validate.Length(1, 256))


class StorageItem(SdkSchema):
    project_id = fields.String()
    org_user_urn = fields.String(allow_none=True)
    user_email = fields.String(allow_none=True)
    checkpoint_count = fields.Integer()
    size_bytes = fields.Integer()
    size_gigabytes = fields.Float()


class Storage(SdkSchema):
    data = fields.List(fields.Nested(StorageItem))

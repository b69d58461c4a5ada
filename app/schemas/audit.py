"""The audit log."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema


class AuditAsked(SdkSchema):
    event_type = fields.String(
        load_default="all", validate=validate.OneOf(("all", "checkpoints", "projects", "teams", "organizations"))
    )
    day = fields.Date(load_default=None, metadata={"description": "UTC; today if it is left out"})


class AuditEntry(SdkSchema):
    timestamp = fields.String()
    event = fields.String()
    event_details = fields.Dict()
    model_id = fields.String()
    tinker_path = fields.String()


class AuditLog(SdkSchema):
    entries = fields.List(fields.Nested(AuditEntry))

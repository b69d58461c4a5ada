"""What the lists share: how much is asked for, and what of it came."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema

MOST = 1000


class Paged(SdkSchema):
    offset = fields.Integer(load_default=0, validate=validate.Range(0, 2**53))
    limit = fields.Integer(load_default=100, validate=validate.Range(1, MOST))


class Scoped(SdkSchema):
    access_scope = fields.String(
        load_default="owned",
        validate=validate.OneOf(("owned", "accessible")),
        metadata={"description": "owned: of projects where you may work; accessible: of all you see"},
    )


class Cursor(SdkSchema):
    offset = fields.Integer()
    limit = fields.Integer()
    total_count = fields.Integer()

"""What all schemas share."""

from __future__ import annotations

from marshmallow import EXCLUDE, Schema, fields, validate

MAX_SEQ = 2**31 - 1


class SdkSchema(Schema):
    """A body the SDK sends or reads: newer SDKs add fields, so unknown ones are dropped."""

    class Meta:
        unknown = EXCLUDE


class ErrorSchema(Schema):
    """Every error's body."""

    detail = fields.String(required=True, metadata={"description": "what is wrong, with which value"})
    error = fields.String(required=True, metadata={"description": "the kind of error"})


def counter(low: int = 0, high: int = MAX_SEQ) -> fields.Integer:
    """A required count, such as a seq_id."""
    return fields.Integer(required=True, strict=True, validate=validate.Range(low, high))


def identifier() -> fields.String:
    """A required id or path."""
    return fields.String(required=True, validate=validate.Length(1, 512))


def metadata() -> fields.Dict:
    """Free text by key, empty by default."""
    return fields.Dict(keys=fields.String(), values=fields.Raw(), load_default=dict)

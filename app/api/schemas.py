"""The shared parts of all schemas: common fields, error bodies, and the pages of lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from marshmallow import EXCLUDE, Schema, ValidationError, fields, pre_load, validate

MAX_SEQ = 2**31 - 1
MAX_METADATA_BYTES = 16 * 1024
"""Largest user_metadata of a session, model or checkpoint, as JSON. It is part of the record and is read with it."""

MOST = 1000


class SdkSchema(Schema):
    """A body that the SDK sends or reads. Newer SDKs add fields, so unknown fields are dropped. Older SDKs, to 0.6 at
    least, send null for a field that newer ones leave out. So null means left out unless it has its own meaning."""

    class Meta:
        unknown = EXCLUDE

    @pre_load
    def _leave_out_null(self, given: Any, **_: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None or self._takes_null(name)}

    def _takes_null(self, name: str) -> bool:
        return name in self.fields and self.fields[name].allow_none


class ErrorSchema(Schema):
    """The body of every error."""

    detail = fields.String(required=True, metadata={"description": "what is wrong, with which value"})
    error = fields.String(required=True, metadata={"description": "the kind of error"})


def counter(low: int = 0, high: int = MAX_SEQ) -> fields.Integer:
    """A required count, such as a seq_id."""
    return fields.Integer(required=True, strict=True, validate=validate.Range(low, high))


def identifier() -> fields.String:
    """A required id or path."""
    return fields.String(required=True, validate=validate.Length(1, 512))


def label() -> fields.String:
    """A short text that is only stored and shown."""
    return fields.String(allow_none=True, validate=validate.Length(max=512))


def access_token(**options: Any) -> fields.String:
    """A key to somebody else's checkpoint. It is not validated here, because the error message would repeat it."""
    return fields.String(
        metadata={"description": "an API key that may read the checkpoint, or a token made from such a key"}, **options
    )


def metadata() -> fields.Dict:
    """Free text by key, empty by default."""
    return fields.Dict(keys=fields.String(), values=fields.Raw(), load_default=dict, validate=check_metadata)


def check_metadata(value: Mapping[str, Any] | None) -> None:
    """Raises ValidationError for more metadata than a record may hold."""
    size = len(json.dumps(value))
    if size > MAX_METADATA_BYTES:
        raise ValidationError(f"Has {size} bytes; at most {MAX_METADATA_BYTES} are allowed.")


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

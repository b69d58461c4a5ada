"""The parts that the schemas of all routes share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from marshmallow import EXCLUDE, Schema, ValidationError, fields, pre_load, validate

from app.ids import MAX_SEQ

_MAX_METADATA_BYTES = 16 * 1024
"""Largest user_metadata of a session, model or checkpoint, as JSON. It is part of the record and is read with it."""
_MOST_ENTRIES = 1000


class SdkFloat(fields.Float):
    """A number for which no SDK sends null on purpose. The SDK writes NaN and infinity as null, so null is an error:
    the default in its place would give another result."""

    default_error_messages = {  # noqa: RUF012 (marshmallow declares it for instances)
        "null": "Is null, which is how the SDK sends NaN or infinity; send a finite number."
    }


class SdkSchema(Schema):
    """A body that the SDK sends or reads. Newer SDKs add fields, so unknown fields are dropped. Older SDKs, to 0.6 at
    least, send null for a field that newer ones leave out. So null means left out, but not where a field reads it."""

    class Meta:
        unknown = EXCLUDE

    @pre_load
    def _leave_out_null(self, given: Any, **_: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None or self._reads_null(name)}

    def _reads_null(self, name: str) -> bool:
        field = self.fields.get(name)
        return field is not None and (field.allow_none or isinstance(field, SdkFloat))


class FirstWrong(fields.List[Any]):
    """A list of at most `most` entries, counted before they are read. It names the first wrong entry and stops there:
    an error for each wrong entry takes seconds for a body of some megabytes."""

    def __init__(self, inner: fields.Field[Any], most: int, **options: Any) -> None:
        super().__init__(inner, **options)
        self._most = most

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.make_error("invalid")
        if len(value) > self._most:
            raise ValidationError(f"Has {len(value)} entries; at most {self._most} are allowed.")
        found = []
        for place, each in enumerate(value):
            try:
                found.append(self.inner.deserialize(each, **kwargs))
            except ValidationError as error:
                raise ValidationError({place: error.messages}) from None
        return found


class ErrorSchema(Schema):
    """The body of every error."""

    detail = fields.String(required=True, metadata={"description": "the mistake, with the wrong value"})
    error = fields.String(required=True, metadata={"description": "the kind of error"})


def nested(schema: type[Schema], default: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> fields.Nested:
    """An object. It is read from `default` if it is left out, so that its fields have their own defaults."""
    return fields.Nested(schema, load_default=lambda: schema().load(default), **options)


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
    if size > _MAX_METADATA_BYTES:
        raise ValidationError(f"Has {size} bytes; at most {_MAX_METADATA_BYTES} are allowed.")


def page_limit(default: int) -> fields.Integer:
    """The most entries in an answer."""
    return fields.Integer(
        load_default=default,
        validate=validate.Range(1, _MOST_ENTRIES),
        metadata={"description": "the greatest number of entries in the answer"},
    )


class Paged(SdkSchema):
    offset = fields.Integer(
        load_default=0, validate=validate.Range(0, 2**53), metadata={"description": "entries to skip"}
    )
    limit = page_limit(100)


class Scoped(SdkSchema):
    access_scope = fields.String(
        load_default="owned",
        validate=validate.OneOf(("owned", "accessible")),
        metadata={"description": "owned: those of projects where you may train; accessible: all that you may see"},
    )


class Cursor(SdkSchema):
    offset = fields.Integer()
    limit = fields.Integer()
    total_count = fields.Integer()

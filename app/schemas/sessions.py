"""Sessions."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, identifier, label, metadata
from app.schemas.lists import MOST, Paged, Scoped

_MOST_TAGS = 64
_NO_REASON = validate.NoneOf(("open", "expired"), error="Is what the server says of sessions that were not finished.")


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
    type = fields.String(required=True, validate=[validate.Length(1, 64), _NO_REASON])


class FinishSession(SdkSchema):
    reason = fields.Nested(FinishReason, required=True)
    detail = fields.String(allow_none=True)


class ListSessions(Paged, Scoped):
    limit = fields.Integer(load_default=20, validate=validate.Range(1, MOST))


class SessionList(SdkSchema):
    sessions = fields.List(fields.String())


class SessionContent(SdkSchema):
    training_run_ids = fields.List(fields.String())
    sampler_ids = fields.List(fields.String())
    user_metadata = fields.Dict()
    display_name = fields.String(allow_none=True)


class MoveSession(SdkSchema):
    project_id = identifier()


class TraceExport(SdkSchema):
    status = fields.String()
    url = fields.String()
    error = fields.String()


class SearchOwner(SdkSchema):
    type = fields.String(load_default="own", validate=validate.OneOf(("own", "accessible", "user")))
    owner_urns = fields.List(fields.String(), load_default=list, validate=validate.Length(max=10))


class SearchStatus(SdkSchema):
    type = fields.String(required=True, validate=validate.OneOf(("active", "cancelled", "failed", "client_finished")))
    reasons = fields.List(
        fields.String(validate=validate.OneOf(("success", "errored", "interrupted"))),
        load_default=None,
        allow_none=True,
    )


class SearchCursor(SdkSchema):
    last_created_at = fields.AwareDateTime(required=True)
    last_session_id = fields.String(required=True)


class SearchSessions(SdkSchema):
    session_id = fields.String(load_default=None, allow_none=True, validate=validate.Length(max=512))
    project_ids = fields.List(fields.String(), load_default=None, allow_none=True, validate=validate.Length(max=1000))
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), load_default=dict)
    # Every session is looked at for each of its words.
    display_name = fields.String(load_default=None, allow_none=True, validate=validate.Length(1, 512))
    owner = fields.Nested(SearchOwner, load_default=lambda: SearchOwner().load({}))
    statuses = fields.List(
        fields.Nested(SearchStatus), load_default=None, allow_none=True, validate=validate.Length(max=16)
    )
    limit = fields.Integer(strict=True, load_default=50, validate=validate.Range(1, 200))
    cursor = fields.Nested(SearchCursor, load_default=None, allow_none=True)


class SessionSummary(SdkSchema):
    session_id = fields.String()
    created_at = fields.String()
    owner = fields.String()
    project_id = fields.String()
    status = fields.Dict(allow_none=True)
    checkpoints_count = fields.Integer()
    checkpoint_storage_bytes = fields.Integer()
    display_name = fields.String(allow_none=True)
    user_metadata = fields.Dict()


class NextCursor(SdkSchema):
    last_created_at = fields.String()
    last_session_id = fields.String()


class SessionsFound(SdkSchema):
    sessions = fields.List(fields.Nested(SessionSummary))
    next_cursor = fields.Nested(NextCursor)

"""Promises, and the polls that redeem them."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, identifier

_MOST_RETRIEVED = 100_000


class Promise(SdkSchema):
    request_id = fields.String()
    model_id = fields.String()


class SamplePromise(SdkSchema):
    request_id = fields.String()
    sample_sequence_ids = fields.List(fields.String())


class RetrieveFuture(SdkSchema):
    request_id = identifier()


class TryAgain(SdkSchema):
    type = fields.String()
    request_id = fields.String()
    queue_state = fields.String()
    queue_state_reason = fields.String()


class CancelFuture(SdkSchema):
    request_id = identifier()


class Target(SdkSchema):
    type = fields.String(load_default="sampling_session", validate=validate.Equal("sampling_session"))
    sampling_session_id = identifier()
    cloned_sampler_id = fields.Integer(strict=True, load_default=0, validate=validate.Range(0, 2**63 - 1))


class RetrieveFutures(SdkSchema):
    target = fields.Nested(Target, required=True)
    prev_cursor = fields.Integer(strict=True, load_default=0, validate=validate.Range(0, 2**53))
    timeout = fields.Float(allow_none=True, validate=validate.Range(0))
    retrieved_request_ids = fields.List(
        fields.String(validate=validate.Length(1, 512)),
        load_default=list,
        validate=validate.Length(max=_MOST_RETRIEVED),
    )


class Completed(SdkSchema):
    state = fields.String()
    request_id = fields.String()
    response_payload_uncompressed_size = fields.Integer()


class CompletedFutures(SdkSchema):
    completions = fields.List(fields.Nested(Completed))
    cursor = fields.Integer()

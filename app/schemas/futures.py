"""Promises, and the polls that redeem them."""

from __future__ import annotations

from marshmallow import fields

from app.schemas.base import SdkSchema, identifier


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

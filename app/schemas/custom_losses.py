"""create_custom_loss; what is in its graph is for app/wire/custom_loss.py to say."""

from __future__ import annotations

from marshmallow import fields, validate

from app.schemas.base import SdkSchema, counter, identifier


class CreateCustomLoss(SdkSchema):
    session_id = identifier()
    custom_loss_seq_id = counter(0, 10**9 - 1)
    name = fields.String(required=True, validate=validate.Length(1, 128))
    inputs = fields.List(fields.Raw(), required=True, metadata={"description": "name and rank of each, logprobs first"})
    graph = fields.Dict(required=True, metadata={"description": "format 1: the nodes of a torch.fx graph, in order"})

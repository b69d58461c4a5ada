"""What Hugging Face's Hub tells of a model, as far as its clients read it here."""

from __future__ import annotations

from marshmallow import Schema, fields


class HubSibling(Schema):
    rfilename = fields.String()
    size = fields.Integer()
    blob_id = fields.String(data_key="blobId")


class HubModel(Schema):
    id = fields.String()
    model_id = fields.String(data_key="modelId")
    sha = fields.String(metadata={"description": "40 hex digits that change with any file"})
    private = fields.Boolean()
    tags = fields.List(fields.String())
    siblings = fields.List(fields.Nested(HubSibling))


class HubEntry(Schema):
    type = fields.String()
    path = fields.String()
    size = fields.Integer()
    oid = fields.String()

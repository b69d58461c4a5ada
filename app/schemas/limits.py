"""Limits and what is used of them."""

from __future__ import annotations

from marshmallow import Schema, fields


class LimitsAsked(Schema):
    project_id = fields.String(metadata={"description": "one that the key may use; its own by default"})


class _Limits(Schema):
    """None: not limited."""

    requests_per_s = fields.Float(allow_none=True)
    tokens_per_s = fields.Float(allow_none=True)
    live_models = fields.Integer(allow_none=True)
    storage_bytes = fields.Integer(allow_none=True)
    concurrent_samples = fields.Integer(allow_none=True)
    weight = fields.Float()


class _Used(Schema):
    """Rates as averages over the last seconds; None where they are not limited."""

    requests_per_s = fields.Float(allow_none=True)
    tokens_per_s = fields.Float(allow_none=True)
    live_models = fields.Integer()
    storage_bytes = fields.Integer()
    concurrent_samples = fields.Integer()


class _Payer(Schema):
    id = fields.String()
    limits = fields.Nested(_Limits)
    used = fields.Nested(_Used)


class LimitsShown(Schema):
    project = fields.Nested(_Payer)
    key = fields.Nested(_Payer)

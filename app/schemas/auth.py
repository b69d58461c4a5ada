"""Keys and tokens."""

from __future__ import annotations

from marshmallow import fields

from app.schemas.base import SdkSchema


class Token(SdkSchema):
    jwt = fields.String()


class _Named(SdkSchema):
    name = fields.String()


class _Addressed(SdkSchema):
    email = fields.String()


class _Details(SdkSchema):
    org_details = fields.Nested(_Named)
    user_details = fields.Nested(_Addressed)


class OwnKey(SdkSchema):
    key_id = fields.Integer()
    name = fields.String()
    note = fields.String()
    project_id = fields.String()
    scopes = fields.List(fields.String())
    details = fields.Nested(_Details)

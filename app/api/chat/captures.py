"""The kept answers of a project's chats and completions, as datums."""

from __future__ import annotations

from typing import Any

from marshmallow import fields, validate

from app.api.base import current_caller, make_blueprint, needs, services
from app.api.schemas import SdkSchema, page_limit

blueprint = make_blueprint("captures", "Sampling")
_PAGE = 100


class OfRun(SdkSchema):
    run_id = fields.String(
        load_default=None,
        validate=validate.Length(max=512),
        metadata={"description": "a run whose checkpoints answered, empty for base models; left out for all"},
    )


class ListCaptures(OfRun):
    after = fields.String(
        load_default="",
        validate=validate.Length(max=512),
        metadata={"description": "last_id of the page before; left out for the first page"},
    )
    limit = page_limit(_PAGE)


class Capture(SdkSchema):
    """A kept answer. `datums` has one for each sampled sequence, as `forward_backward` takes them."""

    id = fields.String()
    request_id = fields.String()
    created = fields.Float()
    model = fields.String()
    datums = fields.List(fields.Dict())


class Captures(SdkSchema):
    captures = fields.List(fields.Nested(Capture))
    has_more = fields.Boolean()
    last_id = fields.String()


class Deleted(SdkSchema):
    deleted = fields.Integer()


@blueprint.route("/captures", methods=["GET"])
@needs("train")
@blueprint.arguments(ListCaptures(), location="query")
@blueprint.response(200, Captures)
def list_captures(asked: dict[str, Any]) -> dict[str, Any]:
    """List the kept answers of the key's project as datums, oldest first."""
    return services().captures.page(current_caller(), asked["run_id"], asked["after"], asked["limit"])


@blueprint.route("/captures", methods=["DELETE"])
@needs("manage")
@blueprint.arguments(OfRun(), location="query")
@blueprint.response(200, Deleted)
def delete_captures(asked: dict[str, Any]) -> dict[str, int]:
    """Delete the kept answers of the key's project."""
    return {"deleted": services().captures.delete(current_caller(), asked["run_id"])}

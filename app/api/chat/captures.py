"""The kept answers of a project's chats and completions, as datums."""

from __future__ import annotations

from typing import Any

from marshmallow import fields, validate

from app.api.base import Cursor, Paged, SdkSchema, current_caller, needs, page_limit, services
from app.api.base import blueprint as make

blueprint = make("captures", "Sampling")
# One answer has up to 128 sequences, and the file of each answer is read for the page.
_PAGE = 20


class OfRun(SdkSchema):
    run_id = fields.String(
        load_default=None,
        validate=validate.Length(max=512),
        metadata={"description": "a run whose checkpoints answered, empty for base models; left out for all"},
    )


class ListCaptures(Paged, OfRun):
    limit = page_limit(_PAGE)


class Capture(SdkSchema):
    """A kept answer. `datums` has one for each sampled sequence, as `forward_backward` takes them."""

    id = fields.String()
    created = fields.Float()
    model = fields.String()
    datums = fields.List(fields.Dict())


class Captures(SdkSchema):
    captures = fields.List(fields.Nested(Capture))
    cursor = fields.Nested(Cursor)


class Deleted(SdkSchema):
    deleted = fields.Integer()


@blueprint.route("/captures", methods=["GET"])
@blueprint.arguments(ListCaptures(), location="query")
@blueprint.response(200, Captures)
def list_captures(asked: dict[str, Any]) -> dict[str, Any]:
    """List the kept answers of the key's project as datums, oldest first."""
    return services().captures.page(current_caller(), asked["run_id"], asked["offset"], asked["limit"])


@blueprint.route("/captures", methods=["DELETE"])
@needs("manage")
@blueprint.arguments(OfRun(), location="query")
@blueprint.response(200, Deleted)
def delete_captures(asked: dict[str, Any]) -> dict[str, int]:
    """Delete the kept answers of the key's project."""
    return {"deleted": services().captures.delete(current_caller(), asked["run_id"])}

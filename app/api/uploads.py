"""Uploads of adapters that were trained elsewhere: start, the files, finish.

A file's URL needs no key: its signature gives the permission. On an S3 store the URL is the S3 server's.
"""

from __future__ import annotations

from typing import Any

from flask import request
from marshmallow import RAISE, fields, validate

from app.api.base import current_caller, idempotency_key, make_blueprint, needs, services
from app.api.checkpoints import SignedUrl, WeightsCopied, folder_store
from app.api.models import LoraConfig
from app.api.schemas import SdkSchema, identifier

blueprint = make_blueprint(
    "uploads",
    "Downloads and uploads",
    parameters={
        "most_bytes": "the greatest size of the file in bytes, from a signed URL",
        "key": "the key of an object, from a signed URL",
    },
)


class StartUpload(SdkSchema):
    """A request to upload the PEFT files of an adapter with this configuration."""

    class Meta:
        unknown = RAISE

    base_model = identifier()
    lora_config = fields.Nested(LoraConfig, required=True)
    destination_project_id = fields.String(load_default=None, validate=validate.Length(1, 256))


class UploadStarted(SdkSchema):
    upload_id = fields.String()
    urls = fields.Dict(
        keys=fields.String(), values=fields.String(), metadata={"description": "file name -> URL for one HTTP PUT"}
    )
    expires = fields.String()


@blueprint.route("/external_weights_upload_start", methods=["POST"])
@needs("train", "manage")
@blueprint.arguments(StartUpload())
@blueprint.response(200, UploadStarted)
def start_upload(asked: dict[str, Any]) -> dict[str, Any]:
    """Start the upload of an adapter: one signed URL for each of its files. A repeat with the same X-Idempotency-Key
    returns the same upload."""
    return services().uploads.start(current_caller(), asked, idempotency_key())


class FinishUpload(SdkSchema):
    class Meta:
        unknown = RAISE

    upload_id = identifier()


@blueprint.route("/external_weights_upload_finish", methods=["POST"])
@needs("train", "manage")
@blueprint.arguments(FinishUpload())
@blueprint.response(200, WeightsCopied)
def finish_upload(asked: dict[str, Any]) -> dict[str, str]:
    """Check the uploaded files and make them a checkpoint; a repeat returns the same checkpoint."""
    return {"tinker_path": services().uploads.finish(current_caller(), asked["upload_id"])}


@blueprint.route("/uploads/<int:most_bytes>/<path:key>", methods=["PUT"])
@blueprint.arguments(SignedUrl(), location="query")
@blueprint.doc(security=[])
@blueprint.response(200)
def put_file(asked: dict[str, Any], most_bytes: int, key: str) -> dict[str, str]:
    """Store a file of an upload behind a signed URL; a file that was sent before is replaced."""
    store = folder_store(key)
    store.check_put(key, most_bytes, asked["expires"], asked["signature"])
    request.max_content_length = most_bytes
    store.replace(key, request.stream)
    return {}

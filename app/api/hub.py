"""Tokenizers for clients with HF_ENDPOINT set to this server: the Hub's read routes, without a key."""

from __future__ import annotations

from typing import Any

from flask import Response, send_file
from marshmallow import Schema, fields

from app.api.base import make_blueprint, services

blueprint = make_blueprint(
    "hub",
    "Tokenizers",
    prefix="",
    parameters={
        "repo_id": "the name of a base model",
        "revision": "main, or the sha in the description of the model",
        "name": "the name of a file of the tokenizer",
        "folder": "a folder of the tokenizer's files",
    },
)


@blueprint.route("/<path:repo_id>/resolve/<revision>/<path:name>", methods=["GET"])
@blueprint.doc(security=[])
@blueprint.response(200, description="The file", content_type="application/octet-stream")
def get_file(repo_id: str, revision: str, name: str) -> Response:
    """Download a file of a base model's tokenizer."""
    found = services().hub.repository(repo_id, revision)
    file = found.file(name)
    answer = send_file(file.path, mimetype="application/octet-stream", etag=file.oid)
    answer.headers["X-Repo-Commit"] = found.commit
    return answer


class HubSibling(Schema):
    rfilename = fields.String()
    size = fields.Integer()
    blob_id = fields.String(data_key="blobId")


class HubModel(Schema):
    id = fields.String()
    model_id = fields.String(data_key="modelId")
    sha = fields.String(metadata={"description": "a hash of all files: 40 hex digits"})
    private = fields.Boolean()
    tags = fields.List(fields.String())
    siblings = fields.List(fields.Nested(HubSibling))


@blueprint.route("/api/models/<path:repo_id>", methods=["GET"])
@blueprint.route("/api/models/<path:repo_id>/revision/<revision>", methods=["GET"])
@blueprint.doc(security=[])
@blueprint.response(200, HubModel)
def describe(repo_id: str, revision: str = "main") -> dict[str, Any]:
    """Describe the tokenizer of a base model: its files, and a hash of their content."""
    found = services().hub.repository(repo_id, revision)
    siblings = [{"rfilename": name, "size": file.size, "blob_id": file.oid} for name, file in found.files.items()]
    return {
        "id": found.id,
        "model_id": found.id,
        "sha": found.commit,
        "private": False,
        "tags": [],
        "siblings": siblings,
    }


class HubEntry(Schema):
    type = fields.String()
    path = fields.String()
    size = fields.Integer()
    oid = fields.String()


@blueprint.route("/api/models/<path:repo_id>/tree/<revision>", methods=["GET"])
@blueprint.route("/api/models/<path:repo_id>/tree/<revision>/<path:folder>", methods=["GET"])
@blueprint.doc(security=[])
@blueprint.response(200, HubEntry(many=True))
def list_files(repo_id: str, revision: str, folder: str = "") -> list[dict[str, Any]]:
    """List all files of a base model's tokenizer, or those in a folder."""
    files = services().hub.repository(repo_id, revision).below(folder)
    return [{"type": "file", "path": name, "size": file.size, "oid": file.oid} for name, file in files.items()]

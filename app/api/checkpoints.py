"""Training runs and their checkpoints: lists, publishing, expiry, copies and downloads.

In a path a checkpoint's id is `<kind>/<name>`, with its slash.

Archives (for SDKs up to 0.34) and objects of the folder store need no key: the signature in the URL gives the
permission.
"""

from __future__ import annotations

from typing import Any

from flask import Response, request, send_file
from marshmallow import fields, validate
from werkzeug.http import http_date

from app.api.base import current_caller, idempotency_key, make_blueprint, needs, services
from app.api.schemas import Cursor, Paged, Scoped, SdkSchema, access_token, identifier, nested, page_limit
from app.errors import NotFound
from app.ids import MAX_NUMBER, TinkerPath
from app.services.views import CHECKPOINT_TYPES, Page
from app.stores.objects.archives import Archive
from app.stores.objects.folder import FolderStore

_PARTS = {
    "run": "the id of a training run, such as the model_id of create_model",
    "kind": "the kind of checkpoint: weights, sampler_weights or external_weights",
    "name": "the name under which the checkpoint was saved",
}

runs_blueprint = make_blueprint("runs", "Checkpoints", parameters=_PARTS)
_TYPES = tuple(CHECKPOINT_TYPES.values())
_CHECKPOINT = "/training_runs/<run>/checkpoints/<kind>/<name>"

checkpoints_blueprint = make_blueprint("checkpoints", "Checkpoints")

archives_blueprint = make_blueprint(
    "archives",
    "Downloads and uploads",
    parameters={**_PARTS, "prefix": "the prefix of a checkpoint's objects, from a signed URL"},
)

objects_blueprint = make_blueprint(
    "objects", "Downloads and uploads", parameters={"key": "the key of an object, from a signed URL"}
)


class ListTrainingRuns(Paged, Scoped):
    limit = page_limit(20)
    project_id = fields.String(validate=validate.Length(1, 256), metadata={"description": "only runs of this project"})


class Checkpoint(SdkSchema):
    """A checkpoint of a training run."""

    checkpoint_id = fields.String()
    checkpoint_type = fields.String()
    time = fields.String()
    tinker_path = fields.String()
    size_bytes = fields.Integer()
    public = fields.Boolean()
    user_metadata = fields.Dict()
    base_model = fields.String()
    expires_at = fields.String()


class TrainingRun(SdkSchema):
    training_run_id = fields.String()
    base_model = fields.String()
    project_id = fields.String()
    model_owner = fields.String()
    is_lora = fields.Boolean()
    lora_rank = fields.Integer(allow_none=True)
    corrupted = fields.Boolean()
    ended = fields.Boolean()
    last_request_time = fields.String()
    last_checkpoint = fields.Nested(Checkpoint, allow_none=True)
    last_sampler_checkpoint = fields.Nested(Checkpoint, allow_none=True)
    user_metadata = fields.Dict()


class TrainingRunPage(SdkSchema):
    training_runs = fields.List(fields.Nested(TrainingRun))
    cursor = fields.Nested(Cursor)


@runs_blueprint.route("/training_runs", methods=["GET"])
@runs_blueprint.arguments(ListTrainingRuns(), location="query")
@runs_blueprint.response(200, TrainingRunPage)
def list_training_runs(asked: dict[str, Any]) -> dict[str, Any]:
    """List runs, newest first."""
    page = Page(asked["offset"], asked["limit"])
    return services().runs.list_runs(current_caller(), asked["access_scope"], asked.get("project_id"), page)


@runs_blueprint.route("/training_runs/<run>", methods=["GET"])
@runs_blueprint.arguments(Scoped(), location="query")
@runs_blueprint.response(200, TrainingRun)
def get_training_run(asked: dict[str, Any], run: str) -> dict[str, Any]:
    """Return a run and its newest checkpoints; access_scope accessible also finds runs with a public checkpoint."""
    return services().runs.describe(run, current_caller(), asked["access_scope"])


@runs_blueprint.route("/training_runs/<run>", methods=["DELETE"])
@needs("manage")
@runs_blueprint.response(200)
def delete_training_run(run: str) -> dict[str, str]:
    """End a run: its waiting calls fail and nothing is left of it but its saved checkpoints."""
    services().models.delete(run, current_caller())
    return {}


class CheckpointList(SdkSchema):
    checkpoints = fields.List(fields.Nested(Checkpoint))


@runs_blueprint.route("/training_runs/<run>/checkpoints", methods=["GET"])
@runs_blueprint.response(200, CheckpointList)
def list_checkpoints(run: str) -> dict[str, Any]:
    """List a run's checkpoints, newest first; only the public ones if the run is not visible to the caller."""
    return {"checkpoints": services().runs.list_checkpoints(run, current_caller())}


@runs_blueprint.route(f"{_CHECKPOINT}/publish", methods=["POST"])
@needs("manage")
@runs_blueprint.response(200)
def publish_checkpoint(run: str, kind: str, name: str) -> dict[str, str]:
    """Publish a checkpoint: everybody with an API key can read it, and nothing else of its run."""
    services().checkpoints.publish(_path(run, kind, name), current_caller(), public=True)
    return {}


@runs_blueprint.route(f"{_CHECKPOINT}/publish", methods=["DELETE"])
@needs("manage")
@runs_blueprint.response(200)
def unpublish_checkpoint(run: str, kind: str, name: str) -> dict[str, str]:
    """Make a published checkpoint private again."""
    services().checkpoints.publish(_path(run, kind, name), current_caller(), public=False)
    return {}


class SetTtl(SdkSchema):
    ttl_seconds = fields.Integer(strict=True, allow_none=True, load_default=None)


@runs_blueprint.route(f"{_CHECKPOINT}/ttl", methods=["PUT"])
@needs("manage")
@runs_blueprint.arguments(SetTtl())
@runs_blueprint.response(200)
def set_checkpoint_ttl(asked: dict[str, Any], run: str, kind: str, name: str) -> dict[str, str]:
    """Set the time in seconds after which a checkpoint expires, or let it never expire."""
    services().checkpoints.set_ttl(_path(run, kind, name), current_caller(), asked["ttl_seconds"])
    return {}


@runs_blueprint.route(_CHECKPOINT, methods=["DELETE"])
@needs("manage")
@runs_blueprint.response(200)
def delete_checkpoint(run: str, kind: str, name: str) -> dict[str, str]:
    """Delete a checkpoint and its files."""
    services().checkpoints.delete(_path(run, kind, name), current_caller())
    return {}


class ExternalUrls(SdkSchema):
    urls = fields.Dict(keys=fields.String(), values=fields.String())
    expires = fields.String()


@runs_blueprint.route(f"{_CHECKPOINT}/external_weights_urls", methods=["GET"])
@runs_blueprint.response(200, ExternalUrls)
def get_external_weights_urls(run: str, kind: str, name: str) -> dict[str, Any]:
    """Return signed download URLs of an external checkpoint's files."""
    return services().checkpoints.urls(_path(run, kind, name), current_caller())


def _path(run: str, kind: str, name: str) -> TinkerPath:
    return TinkerPath.parse(f"tinker://{run}/{kind}/{name}")


class CheckpointPage(CheckpointList):
    cursor = fields.Nested(Cursor)


@checkpoints_blueprint.route("/checkpoints", methods=["GET"])
@checkpoints_blueprint.arguments(Paged(), location="query")
@checkpoints_blueprint.response(200, CheckpointPage)
def list_all_checkpoints(asked: dict[str, Any]) -> dict[str, Any]:
    """List the checkpoints of all runs, newest first."""
    return services().checkpoints.list_all(current_caller(), Page(asked["offset"], asked["limit"]))


class CheckpointCursor(SdkSchema):
    last_created_at = fields.AwareDateTime(required=True)
    last_checkpoint_uuid = fields.String(required=True)


class NextCheckpoint(SdkSchema):
    last_created_at = fields.String()
    last_checkpoint_uuid = fields.String()


class SearchOwner(SdkSchema):
    """The owners in a search: the caller, all that the caller sees, or the named users and projects of these."""

    type = fields.String(load_default="own", validate=validate.OneOf(("own", "accessible", "user")))
    owner_urns = fields.List(fields.String(), load_default=list, validate=validate.Length(max=10))


class SearchCheckpoints(SdkSchema):
    """A search for checkpoints, as the public documentation of SDK 0.39 describes it."""

    project_ids = fields.List(fields.String(), load_default=None, allow_none=True, validate=validate.Length(max=1000))
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), load_default=dict)
    checkpoint_type = fields.String(load_default=None, allow_none=True, validate=validate.OneOf(_TYPES))
    owner = nested(SearchOwner)
    base_models = fields.List(fields.String(), load_default=None, allow_none=True, validate=validate.Length(max=1000))
    limit = fields.Integer(strict=True, load_default=50, validate=validate.Range(1, 200))
    cursor = fields.Nested(CheckpointCursor, load_default=None, allow_none=True)


class CheckpointsFound(CheckpointList):
    next_cursor = fields.Nested(NextCheckpoint)


@checkpoints_blueprint.route("/checkpoints/search", methods=["POST"])
@checkpoints_blueprint.arguments(SearchCheckpoints())
@checkpoints_blueprint.response(200, CheckpointsFound)
def search_checkpoints(asked: dict[str, Any]) -> dict[str, Any]:
    """Search checkpoints by project, metadata, type and base model, newest first."""
    return services().checkpoint_search(current_caller(), asked)


class WeightsInfo(SdkSchema):
    base_model = fields.String()
    is_lora = fields.Boolean()
    lora_rank = fields.Integer()
    train_attn = fields.Boolean()
    train_mlp = fields.Boolean()
    train_unembed = fields.Boolean()


class WeightsInfoAsked(SdkSchema):
    tinker_path = identifier()


@checkpoints_blueprint.route("/weights_info", methods=["POST"])
@checkpoints_blueprint.arguments(WeightsInfoAsked())
@checkpoints_blueprint.response(200, WeightsInfo)
def weights_info(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint, and the requirements on a model that loads it."""
    return services().checkpoints.describe_weights(TinkerPath.parse(asked["tinker_path"]), current_caller())


class CopyWeights(SdkSchema):
    """A request to copy a checkpoint into a project, or as a run of a session (session_id and model_seq_id)."""

    source_path = identifier()
    destination_project_id = fields.String(load_default=None, validate=validate.Length(1, 256))
    session_id = fields.String(load_default=None, validate=validate.Length(1, 512))
    model_seq_id = fields.Integer(strict=True, load_default=None, validate=validate.Range(0, MAX_NUMBER))
    ttl_seconds = fields.Integer(strict=True, allow_none=True, load_default=None)
    weights_access_token = access_token(load_default=None)


class WeightsCopied(SdkSchema):
    tinker_path = fields.String()


@checkpoints_blueprint.route("/copy_weights", methods=["POST"])
@needs("manage")
@checkpoints_blueprint.arguments(CopyWeights())
@checkpoints_blueprint.response(200, WeightsCopied)
def copy_weights(asked: dict[str, Any]) -> dict[str, str]:
    """Copy a checkpoint into a project or session; a repeat with the same X-Idempotency-Key returns the same copy."""
    token = request.headers.get("X-Tinker-Weights-Access-Token", asked["weights_access_token"])
    return {"tinker_path": services().copies.copy(current_caller(), asked, idempotency_key(), token)}


class SignedUrl(SdkSchema):
    expires = fields.Integer(required=True, metadata={"description": "from a signed URL: seconds since 1970"})
    signature = fields.String(required=True, metadata={"description": "from a signed URL"})


@archives_blueprint.route(f"{_CHECKPOINT}/archive", methods=["GET"])
@archives_blueprint.response(302, description="Location is the URL of the archive, valid until Expires")
def get_checkpoint_archive(run: str, kind: str, name: str) -> Response:
    """Redirect to a download URL of a checkpoint's files as one tar."""
    url, expires = services().archives.url(_path(run, kind, name), current_caller())
    return Response(status=302, headers={"Location": url, "Expires": http_date(expires)})


@archives_blueprint.route("/archives/<path:prefix>", methods=["GET"])
@archives_blueprint.arguments(SignedUrl(), location="query")
@archives_blueprint.doc(security=[])
@archives_blueprint.response(200, description="The archive, a tar file", content_type="application/x-tar")
def get_archive(asked: dict[str, Any], prefix: str) -> Response:
    """Download an archive behind a signed URL."""
    return _tar(services().archives.open(prefix, asked["expires"], asked["signature"]))


@archives_blueprint.route("/public_archives/<run>/<kind>/<name>", methods=["GET"])
@archives_blueprint.arguments(SignedUrl(), location="query")
@archives_blueprint.doc(security=[])
@archives_blueprint.response(200, description="The archive, a tar file", content_type="application/x-tar")
def get_public_archive(asked: dict[str, Any], run: str, kind: str, name: str) -> Response:
    """Download a published checkpoint's archive behind a signed URL, as long as it is published."""
    return _tar(services().archives.open_public(_path(run, kind, name), asked["expires"], asked["signature"]))


def _tar(archive: Archive) -> Response:
    size = {"Content-Length": str(archive.size)}
    return _in_chunks(Response(archive.chunks, mimetype="application/x-tar", headers=size))


@objects_blueprint.route("/objects/<path:key>", methods=["GET"])
@objects_blueprint.arguments(SignedUrl(), location="query")
@objects_blueprint.doc(security=[])
@objects_blueprint.response(200, description="The file", content_type="application/octet-stream")
def get_object(asked: dict[str, Any], key: str) -> Response:
    """Download a file behind a signed URL."""
    path = folder_store(key).open_signed(key, asked["expires"], asked["signature"])
    return _in_chunks(send_file(path, mimetype="application/octet-stream"))


def folder_store(key: str) -> FolderStore:
    """The store of an object behind a signed URL. Raises NotFound on an S3 store, whose signed URLs lead to S3."""
    store = services().objects
    if not isinstance(store, FolderStore):
        raise NotFound(f"object {key[:200]!r} does not exist")
    return store


def _in_chunks(download: Response) -> Response:
    """Lets the server send a body in chunks. The SDK takes one that ends before its Content-Length for whole, but an
    end before the last chunk is an error to every client, also behind a proxy. HTTP/1.0 has no chunks."""
    if request.method == "GET" and request.environ["SERVER_PROTOCOL"] != "HTTP/1.0":
        del download.headers["Content-Length"]
    return download

"""The calls that an SDK makes at its start, its telemetry, and pages for operators: readiness and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flask import Response
from marshmallow import fields
from prometheus_client import CONTENT_TYPE_LATEST
from werkzeug.exceptions import RequestEntityTooLarge

from app.api.base import current_caller, json_content, make_blueprint, needs, services
from app.api.examples import CAPABILITIES
from app.api.schemas import SdkSchema
from app.domain.progress import Recorded
from app.errors import RequestError
from app.settings import Settings
from app.telemetry import QUEUES, exposition
from app.wire.bodies import VALUES_EACH_PART
from app.wire.telemetry import recorded

client_blueprint = make_blueprint("client", "Start")

# The SDK's own chunks of a batch. Smaller ones are for a server with lower limits.
_CHUNK_DATUMS, _CHUNK_BYTES = 1024, 5_000_000
# A batch may have a part for each VALUES_EACH_PART values. The parts are its own fields, and for each datum the datum
# itself, a chunk, and up to eight inputs and spans.
_OWN_PARTS, _DATUM_PARTS = 16, 10
# The SDK estimates at least so many bytes for each token: for one of a text the token, for one of an image its inputs.
_TOKEN_BYTES = 4

operations_blueprint = make_blueprint("operations", "Operations", prefix="/")


class ClientConfig(SdkSchema):
    """Optional features of the SDK. All are off except those served here.

    Later SDKs always use three of these features: batches as protobuf (0.20 to 0.24), the same for forward batches,
    and models made from a checkpoint in one call (0.24 to 0.37).
    """

    pjwt_auth_enabled = fields.Boolean()
    parallel_fwdbwd_chunks = fields.Boolean()
    proto_write_fwdbwd = fields.Boolean()
    proto_compress_fwdbwd = fields.Boolean()
    fwd_via_fwdbwd = fields.Boolean()
    create_model_via_load_weights = fields.Boolean()
    sample_use_retrieve_futures = fields.Boolean()
    custom_loss_server_side = fields.Boolean()
    sample_join_sampling_session = fields.Boolean()
    sample_max_concurrent_requests = fields.Integer()
    fwdbwd_max_chunk_len = fields.Integer()
    fwdbwd_max_chunk_bytes_count = fields.Integer()
    use_pyqwest_transport = fields.Boolean()


def chunk_limits(settings: Settings) -> tuple[int, int]:
    """The most datums of a chunk of a batch, and the most bytes by the SDK's estimate."""
    limits = settings.limits
    parts = limits.json_values // VALUES_EACH_PART - _OWN_PARTS
    # The SDK's count is an estimate of the body, so it may take half of what a body may have.
    most_bytes = min(_CHUNK_BYTES, settings.api.max_body_bytes // 2, _TOKEN_BYTES * limits.batch_tokens)
    return min(_CHUNK_DATUMS, limits.datums, parts // _DATUM_PARTS), most_bytes


@client_blueprint.route("/client/config", methods=["POST"])
@client_blueprint.response(200, ClientConfig)
def client_config() -> dict[str, Any]:
    """Return the SDK features that this server supports."""
    settings = services().settings
    chunk_datums, chunk_bytes = chunk_limits(settings)
    return {
        "pjwt_auth_enabled": settings.api.pjwt_auth_enabled,
        # With it, the SDK (0.38) sends the first chunk of a batch last. After an error in another chunk it never sends
        # the first one, and all later calls of that client wait for ever.
        "parallel_fwdbwd_chunks": False,
        "proto_write_fwdbwd": True,
        "proto_compress_fwdbwd": settings.api.compress_batches,
        "fwd_via_fwdbwd": True,
        "create_model_via_load_weights": True,
        "sample_use_retrieve_futures": settings.api.batch_polls,
        "custom_loss_server_side": True,
        "sample_join_sampling_session": True,
        "sample_max_concurrent_requests": services().quotas.most_samples(current_caller(), settings.concurrent_samples),
        "fwdbwd_max_chunk_len": chunk_datums,
        "fwdbwd_max_chunk_bytes_count": chunk_bytes,
        # The SDK's default, pyqwest, can lose the cancellation of the SDK's heartbeat (Python 3.11). Then `close` waits
        # for that task for ever: 70 of 300 closes at a heartbeat every 0.05 s, none of 1,000 with httpx.
        "use_pyqwest_transport": False,
    }


class DynamicConfig(SdkSchema):
    sample_cancel_enabled = fields.Boolean()


@client_blueprint.route("/client/dynamic_config", methods=["POST"])
@client_blueprint.response(200, DynamicConfig)
def dynamic_config() -> dict[str, Any]:
    """Return the settings that a client reads again while it runs."""
    return {"sample_cancel_enabled": True}


class TelemetryAnswer(SdkSchema):
    status = fields.String()


@client_blueprint.route("/telemetry", methods=["POST"])
@client_blueprint.response(200, TelemetryAnswer)
def telemetry() -> dict[str, str]:
    """Keep the metrics that a client records for its runs, and drop all other events: they may hold API keys and
    tracebacks."""
    try:
        body = json_content()
    except (RequestError, RequestEntityTooLarge, RecursionError):
        body = None  # telemetry must not make a client fail
    if found := recorded(body):
        _record(found)
    return {"status": "accepted"}


@needs("train")
def _record(found: Mapping[str, Sequence[Recorded]]) -> None:
    services().runs.record(current_caller(), found)


class SupportedModel(SdkSchema):
    model_name = fields.String()
    max_context_length = fields.Integer(allow_none=True)
    trainable = fields.Boolean()
    sampleable = fields.Boolean()
    dtype = fields.String(
        allow_none=True,
        metadata={
            "description": "The dtype of the frozen weights in the trainer: bfloat16, float32, nf4, int8 or fp8; null "
            "while no trainer is up"
        },
    )
    trainable_groups = fields.List(
        fields.String(),
        allow_none=True,
        metadata={
            "description": "The groups of weights (attn, mlp, unembed) that LoRA adapters cover; null while no "
            "trainer is up"
        },
    )
    never_adapted = fields.Dict(
        keys=fields.String(),
        values=fields.String(),
        metadata={"description": "Modules that no LoRA adapter covers, each with the reason"},
    )
    refusals = fields.Dict(
        keys=fields.String(),
        values=fields.String(),
        metadata={"description": "The roles of workers that cannot serve this model, each with the reason"},
    )


class ServerCapabilities(SdkSchema):
    supported_models = fields.List(fields.Nested(SupportedModel))


@client_blueprint.route("/get_server_capabilities", methods=["GET"])
@client_blueprint.response(200, ServerCapabilities, example=CAPABILITIES.response)
def get_server_capabilities() -> dict[str, Any]:
    """List the base models, whether their workers are up, and the weights that LoRA adapters cover."""
    return {"supported_models": services().bases.capabilities()}


class Health(SdkSchema):
    status = fields.String()


@client_blueprint.route("/healthz", methods=["GET"])
@client_blueprint.doc(security=[])
@client_blueprint.response(200, Health)
def healthz() -> dict[str, str]:
    """Answer 200 while the process runs; /readyz shows whether it can work."""
    return {"status": "ok"}


@operations_blueprint.route("/readyz", methods=["GET"])
@operations_blueprint.doc(security=[])
@operations_blueprint.response(200)
def readyz() -> tuple[dict[str, Any], int]:
    """Answer 200 once every base model has a live trainer and sampler, else 503 with those that are missing."""
    missing = services().bases.missing()
    return {"ready": not missing, "missing": missing}, 503 if missing else 200


@operations_blueprint.route("/metrics", methods=["GET"])
@operations_blueprint.doc(security=[])
@operations_blueprint.response(200, content_type="text/plain")
def metrics() -> Response:
    """Return Prometheus metrics of the API process and of the queues."""
    found = services().queue.metrics()
    QUEUES.set(found.pending, found.backlogs, found.projects)
    return Response(exposition(), content_type=CONTENT_TYPE_LATEST)

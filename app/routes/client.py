"""What an SDK asks at its start, and the telemetry it sends."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller
from app.routes.context import blueprint as make
from app.routes.context import services
from app.schemas.client import ClientConfig, DynamicConfig, Health, ServerCapabilities, TelemetryAnswer

blueprint = make("client", "Start-up and telemetry")


@blueprint.route("/client/config", methods=["POST"])
@blueprint.response(200, ClientConfig)
def client_config() -> dict[str, Any]:
    """Which features of the SDK this server has."""
    settings = services().settings
    return {
        "pjwt_auth_enabled": settings.api.pjwt_auth_enabled,
        "parallel_fwdbwd_chunks": True,
        "proto_write_fwdbwd": True,
        "proto_compress_fwdbwd": settings.api.compress_batches,
        "fwd_via_fwdbwd": True,
        "create_model_via_load_weights": True,
        "sample_use_retrieve_futures": settings.api.batch_polls,
        "custom_loss_server_side": True,
        "sample_join_sampling_session": True,
        "sample_max_concurrent_requests": services().allowances.most_samples(
            current_caller(), settings.concurrent_samples
        ),
        # The SDK's default, pyqwest, can lose the cancellation of the SDK's heartbeat (Python 3.11), and `close` waits
        # for that task for good: 70 of 300 closes at a heartbeat every 0.05 s, none of 1,000 with httpx.
        "use_pyqwest_transport": False,
    }


@blueprint.route("/client/dynamic_config", methods=["POST"])
@blueprint.response(200, DynamicConfig)
def dynamic_config() -> dict[str, Any]:
    """What a client asks for again while it runs."""
    return {"sample_cancel_enabled": True}


@blueprint.route("/telemetry", methods=["POST"])
@blueprint.response(200, TelemetryAnswer)
def telemetry() -> dict[str, str]:
    """Accepted and dropped unread: events may hold API keys and tracebacks."""
    return {"status": "accepted"}


@blueprint.route("/get_server_capabilities", methods=["GET"])
@blueprint.response(200, ServerCapabilities)
def get_server_capabilities() -> dict[str, Any]:
    """The base models served here, and whether their workers are up."""
    return {"supported_models": services().bases.capabilities()}


@blueprint.route("/healthz", methods=["GET"])
@blueprint.response(200, Health)
def healthz() -> dict[str, str]:
    """The process answers; see /readyz for whether it can work."""
    return {"status": "ok"}

"""For those who run the server: readiness and metrics, without a key."""

from __future__ import annotations

from typing import Any

from flask import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.routes.context import blueprint as make
from app.routes.context import services
from app.telemetry import REGISTRY, set_queues

blueprint = make("operations", "Operations", prefix="/")


@blueprint.route("/readyz", methods=["GET"])
@blueprint.response(200)
def readyz() -> tuple[dict[str, Any], int]:
    """200 once every base model has a live trainer and sampler; else 503 with what is missing."""
    missing = services().bases.missing()
    return {"ready": not missing, "missing": missing}, 503 if missing else 200


@blueprint.route("/metrics", methods=["GET"])
@blueprint.response(200, content_type="text/plain")
def metrics() -> Response:
    """Prometheus metrics of the API process and of the queues."""
    set_queues(services().oplog.pending(depth=1))
    return Response(generate_latest(REGISTRY), content_type=CONTENT_TYPE_LATEST)

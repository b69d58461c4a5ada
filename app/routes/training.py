"""forward_backward and optim_step: the hot path. SDKs up to 0.24 send batches as JSON, or forward ones to a route of
their own."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.errors import BadRequest
from app.routes.bodies import large
from app.routes.context import blueprint as make
from app.routes.context import services
from app.routes.seqs import consumes_seq, read_envelope
from app.schemas.futures import Promise
from app.schemas.training import OptimStep

blueprint = make("training", "Training")
_JSON = {"application/json": {"schema": {"type": "object"}}}
_BATCH_BODY = {
    "required": True,
    "description": "A ForwardBackwardRequest of app/wire/tinker.proto, or the same as JSON, as older SDKs send it; "
    "zstd-compressed if Content-Encoding says so.",
    "content": {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}, **_JSON},
}
_FORWARD_BODY = {"required": True, "description": "model_id, seq_id, and forward_input with a batch.", "content": _JSON}


@blueprint.route("/forward_backward", methods=["POST"])
@needs("train")
@blueprint.doc(requestBody=_BATCH_BODY)
@large
@consumes_seq(gradient=True)
@blueprint.response(200, Promise)
def forward_backward() -> dict[str, str]:
    """Add a batch's gradient to the pending one, or only compute its logprobs."""
    return services().training.forward_backward(current_caller(), read_envelope())


@blueprint.route("/forward", methods=["POST"])
@needs("train")
@blueprint.doc(requestBody=_FORWARD_BODY)
@large
@consumes_seq()
@blueprint.response(200, Promise)
def forward() -> dict[str, str]:
    """Only compute a batch's logprobs; newer SDKs ask forward_backward for that."""
    envelope = read_envelope()
    if not envelope.forward_only:
        raise BadRequest("forward takes its batch as forward_input: send what adds a gradient to forward_backward")
    return services().training.forward_backward(current_caller(), envelope)


@blueprint.route("/optim_step", methods=["POST"])
@needs("train")
@consumes_seq()
@blueprint.arguments(OptimStep())
@blueprint.response(200, Promise)
def optim_step(asked: dict[str, Any]) -> dict[str, str]:
    """One AdamW step on the pending gradient."""
    return services().training.optim_step(current_caller(), asked)

"""forward_backward and optim_step: the hot path."""

from __future__ import annotations

from typing import Any

from app.auth import current_caller, needs
from app.routes.bodies import large
from app.routes.context import blueprint as make
from app.routes.context import services
from app.routes.seqs import consumes_seq, read_envelope
from app.schemas.futures import Promise
from app.schemas.training import OptimStep

blueprint = make("training", "Training")
_PROTOBUF_BODY = {
    "required": True,
    "description": "A ForwardBackwardRequest of app/wire/tinker.proto, zstd-compressed if Content-Encoding says so; "
    "its future's result is protobuf as well.",
    "content": {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}},
}


@blueprint.route("/forward_backward", methods=["POST"])
@needs("train")
@blueprint.doc(requestBody=_PROTOBUF_BODY)
@large
@consumes_seq(gradient=True)
@blueprint.response(200, Promise)
def forward_backward() -> dict[str, str]:
    """Add a batch's gradient to the pending one, or only compute its logprobs."""
    return services().training.forward_backward(current_caller(), read_envelope())


@blueprint.route("/optim_step", methods=["POST"])
@needs("train")
@consumes_seq()
@blueprint.arguments(OptimStep())
@blueprint.response(200, Promise)
def optim_step(asked: dict[str, Any]) -> dict[str, str]:
    """One AdamW step on the pending gradient."""
    return services().training.optim_step(current_caller(), asked)

"""Training calls: batches and steps, saving and loading weights, and custom losses.

SDKs up to 0.24 send batches as JSON, or send forward batches to a separate route.

A call that gets a final 4xx consumes its seq_id: the client does not send it again, so later calls must not wait for
it. A call over a limit that does not pass by itself (LimitReached) consumes its seq_id too. Other 403s leave the seq
free, because a caller who may not train must not change a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from flask import request
from marshmallow import ValidationError, fields, validate, validates_schema
from werkzeug.exceptions import ClientDisconnected, HTTPException

from app.api.base import (
    View,
    at_most,
    batch_content,
    content,
    current_caller,
    json_content,
    large,
    make_blueprint,
    needs,
    services,
)
from app.api.client import chunk_limits
from app.api.errors import NOT_UNICODE, describe
from app.api.examples import FORWARD_BACKWARD, OPTIM_STEP, SAVE_WEIGHTS
from app.api.futures import Promise
from app.api.models import Hyperparameters, model_role
from app.api.schemas import SdkFloat, SdkSchema, access_token, check_metadata, counter, identifier, metadata, nested
from app.domain.ops import AdamParams
from app.errors import BadRequest, LimitReached, RequestError
from app.ids import MAX_NUMBER, MAX_SEQ
from app.stores.redis.types import RefusalKind
from app.wire import forward_backward as wire
from app.wire import json_bodies
from app.wire.forward_backward import Envelope

training_blueprint = make_blueprint("training", "Training")
_JSON = {"application/json": {"schema": {"type": "object"}}}
_BATCH_BODY = {
    "required": True,
    "description": "A ForwardBackwardRequest of app/wire/tinker.proto, or the same as JSON, as older SDKs send it; "
    "zstd-compressed if Content-Encoding says so.",
    "content": {
        "application/json": {**_JSON["application/json"], "example": FORWARD_BACKWARD.request},
        "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}},
    },
}
_FORWARD_BODY = {"required": True, "description": "model_id, seq_id, and forward_input with a batch.", "content": _JSON}

_ADAM_DEFAULTS = AdamParams()
# An SSH key of RSA with 4,096 bits has 724 characters, and a comment may follow.
_LONGEST_KEY = 4096

weights_blueprint = make_blueprint("weights", "Weights")

custom_losses_blueprint = make_blueprint("custom_losses", "Training")
# The JSON of a loss is about twice as large as its form in the journal (MAX_BYTES of app/wire/custom_loss.py).
_MAX_LOSS_BODY = 512 * 1024

_FINAL_STATUSES = (400, 413, 422)


def consumes_seq(*, gradient: bool = False) -> Callable[[View], View]:
    """A decorator that makes a final 4xx consume the call's seq. It goes directly below the route, outside of body
    parsing, so that a 422 of the parser counts too.

    `gradient`: the gradient of the refused call is missing from the next optim_step.
    The journal refuses only seqs that are free. If a call was admitted under the seq, this one may be its repeat, and
    another process admitted the first copy meanwhile. So this one is tried again: a repeat is answered with the first
    copy's future, anything else with the same error.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return view(*args, **kwargs)
            except RequestError as error:
                is_final = error.status in _FINAL_STATUSES or isinstance(error, LimitReached)
                if not is_final or _refuse_seq(str(error), gradient):
                    raise
            except HTTPException as error:
                # The client of a body that ended too soon sends the call again.
                if error.code in _FINAL_STATUSES and not isinstance(error, ClientDisconnected):
                    _refuse_seq(describe(error), gradient)
                raise
            except UnicodeEncodeError:  # a 400 as well (app/api/errors.py)
                _refuse_seq(NOT_UNICODE, gradient)
                raise
            return view(*args, **kwargs)

        return cast(View, wrapped)

    return decorate


@training_blueprint.route("/forward_backward", methods=["POST"])
@needs("train")
@training_blueprint.doc(requestBody=_BATCH_BODY)
@large
@consumes_seq(gradient=True)
@training_blueprint.response(200, Promise, example=FORWARD_BACKWARD.response)
def forward_backward() -> dict[str, str]:
    """Add a batch's gradient to the pending one, or only compute its logprobs."""
    return services().training.forward_backward(current_caller(), read_envelope())


@training_blueprint.route("/forward", methods=["POST"])
@needs("train")
@training_blueprint.doc(requestBody=_FORWARD_BODY)
@large
@consumes_seq()
@training_blueprint.response(200, Promise)
def forward() -> dict[str, str]:
    """Only compute a batch's logprobs, for older SDKs; newer ones use forward_backward."""
    envelope = read_envelope()
    if not envelope.forward_only:
        raise BadRequest("forward needs its batch in forward_input; send a batch for gradients to forward_backward")
    return services().training.forward_backward(current_caller(), envelope)


class Adam(Hyperparameters):
    """The AdamW parameters of optim_step. forward_backward is protobuf and is in app/wire."""

    learning_rate = SdkFloat(load_default=_ADAM_DEFAULTS.learning_rate)
    beta1 = SdkFloat(load_default=_ADAM_DEFAULTS.beta1)
    beta2 = SdkFloat(load_default=_ADAM_DEFAULTS.beta2)
    eps = SdkFloat(load_default=_ADAM_DEFAULTS.eps)
    weight_decay = SdkFloat(load_default=_ADAM_DEFAULTS.weight_decay)
    grad_clip_norm = SdkFloat(load_default=_ADAM_DEFAULTS.grad_clip_norm)


class OptimStep(SdkSchema):
    model_id = identifier()
    seq_id = counter(1)
    adam_params = nested(Adam)
    optimizer_params = fields.Dict(
        keys=fields.String(), metadata={"description": "an optimizer other than AdamW; none is supported"}
    )


@training_blueprint.route("/optim_step", methods=["POST"])
@needs("train")
@consumes_seq()
@training_blueprint.arguments(OptimStep(), example=OPTIM_STEP.request)
@training_blueprint.response(200, Promise, example=OPTIM_STEP.response)
def optim_step(asked: dict[str, Any]) -> dict[str, str]:
    """Take one AdamW step with the pending gradient."""
    return services().training.optim_step(current_caller(), asked)


class _Save(SdkSchema):
    model_id = identifier()
    seq_id = counter(1)
    ttl_seconds = fields.Integer(strict=True, allow_none=True)
    overwrite = fields.Boolean(load_default=False)
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), allow_none=True, validate=check_metadata)


class SaveWeights(_Save):
    """A request to save a training checkpoint."""

    path = identifier()


@weights_blueprint.route("/save_weights", methods=["POST"])
@needs("train")
@consumes_seq()
@weights_blueprint.arguments(SaveWeights(), example=SAVE_WEIGHTS.request)
@weights_blueprint.response(200, Promise, example=SAVE_WEIGHTS.response)
def save_weights(asked: dict[str, Any]) -> dict[str, str]:
    """Save a training checkpoint: weights and optimizer state."""
    return services().training.save_weights(current_caller(), asked)


class SaveWeightsForSampler(_Save):
    path = fields.String(allow_none=True)
    sampling_session_seq_id = fields.Integer(strict=True, allow_none=True, validate=validate.Range(0, MAX_NUMBER))
    kind = fields.String(
        load_default="snapshot",
        validate=validate.OneOf(("snapshot", "inflight")),
        metadata={"description": "snapshot: these weights for ever; inflight: always the newest weights of this kind"},
    )


@weights_blueprint.route("/save_weights_for_sampler", methods=["POST"])
@needs("train")
@consumes_seq()
@weights_blueprint.arguments(SaveWeightsForSampler())
@weights_blueprint.response(200, Promise)
def save_weights_for_sampler(asked: dict[str, Any]) -> dict[str, str]:
    """Save weights to sample from, under a path or for one sampling session."""
    return services().training.save_weights_for_sampler(current_caller(), asked)


class SaveWeightsExternal(_Save):
    path = identifier()
    age_encryption_recipients = fields.List(
        fields.String(validate=validate.Length(1, _LONGEST_KEY)), allow_none=True, validate=validate.Length(max=10)
    )
    format = fields.String(
        allow_none=True,
        metadata={"description": "peft or huggingface; default: export_format in the model's user_metadata"},
    )


@weights_blueprint.route("/save_weights_external", methods=["POST"])
@needs("train")
@consumes_seq()
@weights_blueprint.arguments(SaveWeightsExternal())
@weights_blueprint.response(200, Promise)
def save_weights_external(asked: dict[str, Any]) -> dict[str, str]:
    """Save files to download: PEFT, or the merged model."""
    return services().training.save_weights_external(current_caller(), asked)


_OF_MODEL, _OF_SESSION = {"model_id", "seq_id"}, {"session_id", "model_seq_id"}


class LoadWeights(SdkSchema):
    """A request to load weights, either as a model's next Op (model_id, seq_id) or as a new model (session_id,
    model_seq_id)."""

    path = identifier()
    optimizer = fields.Boolean(load_default=False)
    model_id = fields.String()
    seq_id = fields.Integer(strict=True, validate=validate.Range(1, MAX_SEQ))
    session_id = fields.String()
    model_seq_id = fields.Integer(strict=True, validate=validate.Range(0, MAX_NUMBER))
    base_model = fields.String()
    optimizer_config = fields.Dict(keys=fields.String())
    model_role = model_role()
    user_metadata = metadata()
    weights_access_token = access_token()

    @validates_schema
    def _one_addressing(self, data: dict[str, object], **_: object) -> None:
        given = data.keys() & (_OF_MODEL | _OF_SESSION)
        if given not in (_OF_MODEL, _OF_SESSION):
            raise ValidationError(
                "send model_id and seq_id, or session_id and model_seq_id, and nothing else of these four "
                f"(got {', '.join(sorted(given)) or 'none'})"
            )


@weights_blueprint.route("/load_weights", methods=["POST"])
@needs("train")
@consumes_seq()
@weights_blueprint.arguments(LoadWeights())
@weights_blueprint.response(200, Promise)
def load_weights(asked: dict[str, Any]) -> dict[str, str]:
    """Load a checkpoint into a model, or make a new model from one."""
    if "model_id" in asked:
        return services().training.load_weights(current_caller(), asked)
    return services().models.create_from(current_caller(), asked)


class CreateCustomLoss(SdkSchema):
    """A request for a custom loss. app/wire/custom_loss.py checks its graph."""

    session_id = identifier()
    custom_loss_seq_id = counter(0, MAX_NUMBER)
    name = fields.String(required=True, validate=validate.Length(1, 128))
    inputs = fields.List(
        fields.Raw(), required=True, metadata={"description": "name and rank of each input, logprobs first"}
    )
    graph = fields.Dict(required=True, metadata={"description": "format 1: the nodes of a torch.fx graph, in order"})


@custom_losses_blueprint.route("/create_custom_loss", methods=["POST"])
@needs("train")
@at_most(_MAX_LOSS_BODY)
@custom_losses_blueprint.arguments(CreateCustomLoss())
@custom_losses_blueprint.response(200, Promise)
def create_custom_loss(asked: dict[str, Any]) -> dict[str, str]:
    """Create a loss function from its traced graph, for forward_backward calls."""
    return services().custom_losses.create(current_caller(), asked)


def read_envelope() -> Envelope:
    """The envelope of the current request's body: its model and seq. Raises BadRequest or TooLarge."""
    if request.is_json:
        return json_bodies.open_envelope(json_content())
    return wire.open_envelope(batch_content())


def _refuse_seq(reason: str, gradient: bool) -> bool:
    """Consumes the call's seq. Returns False, without a change, if a call was admitted under it."""
    try:
        envelope = read_envelope()
    except (RequestError, HTTPException):
        return True
    kind: RefusalKind = "skip"
    if gradient and not envelope.forward_only:
        kind = "forward_backward" if _may_be_a_chunk(envelope) else "lost_batch"
    kept = reason.encode(errors="backslashreplace").decode()  # a field's name may be the invalid text
    return services().admission.refuse(envelope.model_id, envelope.seq, current_caller(), kept, kind)


def _may_be_a_chunk(envelope: Envelope) -> bool:
    """True for a batch so large that another chunk may follow. The SDK sends that chunk also after a refusal, and it
    must not pass for the corrected batch. The SDK begins a new chunk where one has the most datums, or where the next
    datum would make it too large."""
    datums, most_bytes = chunk_limits(services().settings)
    return envelope.datums >= datums or len(content()) >= most_bytes // 4

"""Decodes a forward_backward body to its Op in two steps: first the model it is for, then its content.

The first step names the model, so only after it can a fault be counted against a model. A fault found in the second
step consumes the seq.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from google.protobuf.message import DecodeError

from app.domain.images import Image
from app.domain.losses import CUSTOM, LOSSES, CustomLoss
from app.domain.ops import Batch, ForwardBackward, Ragged
from app.domain.routes import Span
from app.errors import BadRequest
from app.wire import tinker_pb2 as pb
from app.wire.images import ModelInput, columns
from app.wire.tensors import buffer, check_dense_size, to_array

FindLoss = Callable[[str], CustomLoss]
"""Returns the custom loss with a loss_id. Raises BadRequest when the caller has no loss with this id."""
_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The model and seq that a body is for, and its number of datums. `decode` builds the Op; it raises BadRequest
    naming the datum and key at fault. `spans` decodes the origins of each datum's tokens, and also raises
    BadRequest."""

    model_id: str
    seq: int
    forward_only: bool
    datums: int
    decode: Callable[[FindLoss], ForwardBackward]
    spans: Callable[[], Sequence[Sequence[Span]]]


def no_losses(loss_id: str) -> CustomLoss:
    """A FindLoss for callers without custom losses."""
    raise BadRequest(f"loss {loss_id[:200]!r} does not exist")


def open_envelope(body: bytes) -> Envelope:
    """Reads the envelope of a protobuf body. Raises BadRequest when the body is not a ForwardBackwardRequest."""
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise BadRequest(f"the body of {len(body)} bytes is not a ForwardBackwardRequest protobuf") from None
    return Envelope(
        request.model_id,
        request.seq_id,
        request.forward_only,
        len(request.data),
        decode=lambda find: _to_op(request, find),
        spans=lambda: _spans(request),
    )


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The settings for all datums of a batch: the loss, its config, and for a custom loss the loss itself."""

    loss_fn: str
    config: dict[str, float]
    forward_only: bool
    custom: CustomLoss | None

    @classmethod
    def of(cls, loss_fn: str, config: Mapping[str, float | str], forward_only: bool, find: FindLoss) -> BatchHeader:
        """Builds a BatchHeader. Raises BadRequest for a string in the config, except the loss_id of a custom loss, and
        for a custom loss without a loss_id."""
        settings = dict(config)
        loss_id = settings.pop("loss_id", None) if loss_fn == CUSTOM else None
        if loss_fn == CUSTOM and not isinstance(loss_id, str):
            raise BadRequest("loss_fn custom needs the loss_id of create_custom_loss in its loss_fn_config, as a text")
        for key, value in settings.items():
            if isinstance(value, str):
                raise BadRequest(f"loss_fn_config {key[:80]!r} must be a number")
        numbers = {key: float(value) for key, value in settings.items()}
        return cls(loss_fn, numbers, forward_only, find(loss_id) if isinstance(loss_id, str) else None)

    @property
    def taken(self) -> tuple[str, ...]:
        """The names of the inputs that the loss reads."""
        if self.custom is not None:
            return tuple(self.custom.columns)
        spec = LOSSES.get(self.loss_fn)
        return (*spec.inputs, *spec.optional) if spec else ()

    @property
    def ones(self) -> tuple[str, ...]:
        """The names of the inputs that are ones in a datum without them."""
        spec = LOSSES.get(self.loss_fn)
        return spec.ones if spec else ()


def build_op(
    head: BatchHeader,
    tokens: Sequence[np.ndarray],
    images: tuple[Image, ...],
    inputs: Sequence[Mapping[str, pb.Tensor]],
) -> ForwardBackward:
    """Builds the Op from datums; inputs that `head.taken` does not name are ignored.

    Raises BadRequest for a malformed tensor, an input that only some datums have and that is not one of `head.ones`,
    and target_tokens that are not integers.
    """
    names = [name for name in head.taken if any(name in datum for datum in inputs)]
    check_dense_size(names, inputs)
    made: dict[str, Ragged] = {}
    for name in names:
        targets = made.get("target_tokens") if name in head.ones else None
        made[name] = _column(name, inputs, head.custom, targets)
    batch = Batch(Ragged.of(tokens, np.int32), made, images)
    return ForwardBackward(batch, head.loss_fn, head.config, head.forward_only, head.custom)


def _column(
    name: str, inputs: Sequence[Mapping[str, pb.Tensor]], custom: CustomLoss | None, ones_like: Ragged | None
) -> Ragged:
    """The input `name` of all datums. A datum without it has ones in its shape of `ones_like`."""
    missing = next((i for i, datum in enumerate(inputs) if name not in datum), None)
    if missing is not None and ones_like is None:
        raise BadRequest(f"datum {missing}: {name} is missing, while other datums have it")
    arrays = [
        np.ones(ones_like.shapes[i], np.float32)
        if ones_like is not None and name not in datum
        else to_array(datum[name], f"datum {i}: {name}")
        for i, datum in enumerate(inputs)
    ]
    if name == "target_tokens":
        return _targets(arrays)
    return Ragged.of(arrays, np.float32) if custom is None else _custom_column(name, arrays, custom.columns[name])


def _targets(arrays: Sequence[np.ndarray]) -> Ragged:
    for i, array in enumerate(arrays):
        if array.dtype.kind != "i":
            raise BadRequest(f"datum {i}: target_tokens are {array.dtype.name}; they must be integers")
    return Ragged.of(arrays, np.int64)


def _custom_column(name: str, arrays: Sequence[np.ndarray], rank: int) -> Ragged:
    """An input of a custom loss. Integers are int64 and the rest float32, as on the client; a scalar becomes one
    value."""
    kinds = [array.dtype.kind for array in arrays]
    if len(set(kinds)) > 1:
        other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
        raise BadRequest(f"datum {other}: {name} is {arrays[other].dtype.name}, but {arrays[0].dtype.name} in datum 0")
    shaped = [array.reshape(()) if rank == 0 and array.shape == (1,) else array for array in arrays]
    return Ragged.of(shaped, np.int64 if kinds[0] == "i" else np.float32)


def _to_op(request: pb.ForwardBackwardRequest, find: FindLoss) -> ForwardBackward:
    head = BatchHeader.of(request.loss_fn, _loss_config(request), request.forward_only, find)
    tokens, images = columns(_model_input(datum, i) for i, datum in enumerate(request.data))
    return build_op(head, tokens, images, [datum.loss_fn_inputs for datum in request.data])


def _model_input(datum: pb.Datum, i: int) -> ModelInput:
    found = ModelInput(f"datum {i}", i)
    for kind, chunks in groupby(datum.model_input, lambda chunk: chunk.WhichOneof("chunk")):
        if kind == "encoded_text":
            data = b"".join(chunk.encoded_text.tokens for chunk in chunks)
            found.add_text(buffer(data, _INT32, f"datum {i}: model_input"))
        elif kind == "image":
            for chunk in chunks:
                _add_image(found, chunk.image, i)
        else:
            raise BadRequest(f"datum {i}: chunk type {kind or 'none'} is not supported; send text or image chunks")
    return found


def _add_image(found: ModelInput, image: pb.ImageChunk, i: int) -> None:
    if image.HasField("override_dimensions"):
        raise BadRequest(
            f"datum {i}: override_dimensions of an image is not supported: resize the image to that size yourself"
        )
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    found.add_image(image.data, image.format, expected)


def _spans(request: pb.ForwardBackwardRequest) -> list[list[Span]]:
    return [
        [_span(span, f"datum {i}: model_input_spans") for span in datum.model_input_spans]
        for i, datum in enumerate(request.data)
    ]


def _span(span: pb.ProvenanceSpan, what: str) -> Span:
    kind = span.WhichOneof("span")
    if kind is None:
        raise BadRequest(f"{what}: a span with neither prompt_tokens nor sampled_tokens")
    found = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
    return Span(found.sequence_id, kind == "sampled_tokens", found.offset, found.length)


def _loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {key: _setting(key, value) for key, value in request.loss_fn_config_v2.items()}


def _setting(key: str, value: pb.LossConfigValue) -> float | str:
    match value.WhichOneof("value"):
        case "number":
            return value.number
        case "text":
            return value.text
    raise BadRequest(f"loss_fn_config {key[:80]!r} has no value")

"""A forward_backward body to its Op, in two steps: who it is for, then what is in it.

The first step must succeed before anything can be blamed on a model; a fault found in the second consumes the seq.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from app.domain.batch import Batch, Ragged
from app.domain.losses import LOSSES
from app.domain.ops import ForwardBackward
from app.errors import BadRequest
from app.wire import tensors
from app.wire import tinker_pb2 as pb

_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Whom a body is for. `decode` makes the Op; it raises BadRequest naming the datum and key at fault."""

    model_id: str
    seq: int
    forward_only: bool
    decode: Callable[[], ForwardBackward]


def decode_forward_backward(body: bytes, content_encoding: str = "") -> tuple[str, int, ForwardBackward]:
    """(model id, seq, Op) of a protobuf body. Raises BadRequest."""
    envelope = open_envelope(body, content_encoding)
    return envelope.model_id, envelope.seq, envelope.decode()


def open_envelope(body: bytes, content_encoding: str = "") -> Envelope:
    """Raises BadRequest when the body is compressed or is no ForwardBackwardRequest."""
    if content_encoding not in ("", "identity"):
        raise BadRequest(f"Content-Encoding {content_encoding!r} is not supported: send the protobuf uncompressed")
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise BadRequest(f"the body of {len(body)} bytes is not a ForwardBackwardRequest protobuf") from None
    return Envelope(request.model_id, request.seq_id, request.forward_only, lambda: _to_op(request))


def build_op(
    tokens: Sequence[np.ndarray],
    inputs: Sequence[Mapping[str, pb.Tensor]],
    loss_fn: str,
    loss_config: Mapping[str, float],
    forward_only: bool,
) -> ForwardBackward:
    """The Op of datums; what `taken(loss_fn)` does not name is ignored.

    Raises BadRequest for a malformed tensor, an input only some datums have, and target_tokens that are not integers.
    """
    columns = {name: _column(name, inputs) for name in taken(loss_fn) if any(name in datum for datum in inputs)}
    return ForwardBackward(Batch(Ragged.of(tokens, np.int32), columns), loss_fn, dict(loss_config), forward_only)


def taken(loss_fn: str) -> tuple[str, ...]:
    """The inputs a loss reads."""
    spec = LOSSES.get(loss_fn)
    return (*spec.inputs, *spec.optional) if spec else ()


def _column(name: str, inputs: Sequence[Mapping[str, pb.Tensor]]) -> Ragged:
    missing = next((i for i, datum in enumerate(inputs) if name not in datum), None)
    if missing is not None:
        raise BadRequest(f"datum {missing}: {name} is missing, while other datums have it")
    tensors.check_unfolded([datum[name] for datum in inputs], name)
    arrays = [tensors.to_array(datum[name], f"datum {i}: {name}") for i, datum in enumerate(inputs)]
    if name != "target_tokens":
        return Ragged.of(arrays, np.float32)
    for i, array in enumerate(arrays):
        if array.dtype.kind != "i":
            raise BadRequest(f"datum {i}: target_tokens are {array.dtype.name}; they must be integers")
    return Ragged.of(arrays, np.int64)


def _to_op(request: pb.ForwardBackwardRequest) -> ForwardBackward:
    return build_op(
        [_tokens(datum, i) for i, datum in enumerate(request.data)],
        [datum.loss_fn_inputs for datum in request.data],
        request.loss_fn,
        _loss_config(request),
        request.forward_only,
    )


def _tokens(datum: pb.Datum, i: int) -> np.ndarray:
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise BadRequest(f"datum {i}: a {chunk.WhichOneof('chunk') or 'missing'} chunk; only text is supported")
    data = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    return tensors.buffer(data, _INT32, f"datum {i}: model_input")


def _loss_config(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise BadRequest(f"loss_fn_config {key!r} must be a number")
    return {key: value.number for key, value in request.loss_fn_config_v2.items()}

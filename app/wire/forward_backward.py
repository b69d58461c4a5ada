"""A forward_backward body to its Op, in two steps: who it is for, then what is in it.

The first step must succeed before anything can be blamed on a model; a fault found in the second consumes the seq.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from app.domain.batch import Batch, Ragged
from app.domain.custom_losses import CustomLoss
from app.domain.losses import CUSTOM, LOSSES
from app.domain.ops import ForwardBackward
from app.errors import BadRequest
from app.wire import tensors
from app.wire import tinker_pb2 as pb

FindLoss = Callable[[str], CustomLoss]
"""The custom loss behind a loss_id. Raises BadRequest when the caller has none by that id."""

_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Whom a body is for, and how many datums it has. `decode` makes the Op; it raises BadRequest naming the datum and
    key at fault."""

    model_id: str
    seq: int
    forward_only: bool
    datums: int
    decode: Callable[[FindLoss], ForwardBackward]


def no_losses(loss_id: str) -> CustomLoss:
    """A FindLoss for whoever has none."""
    raise BadRequest(f"loss {loss_id[:200]!r} does not exist")


def decode_forward_backward(body: bytes, find: FindLoss = no_losses) -> tuple[str, int, ForwardBackward]:
    """(model id, seq, Op) of a protobuf body. Raises BadRequest."""
    envelope = open_envelope(body)
    return envelope.model_id, envelope.seq, envelope.decode(find)


def open_envelope(body: bytes) -> Envelope:
    """Raises BadRequest when the body is no ForwardBackwardRequest."""
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise BadRequest(f"the body of {len(body)} bytes is not a ForwardBackwardRequest protobuf") from None
    who = request.model_id, request.seq_id, request.forward_only
    return Envelope(*who, len(request.data), lambda find: _to_op(request, find))


@dataclass(frozen=True, slots=True)
class Head:
    """What is said of all datums at once: the loss, its settings, and for a custom one the loss itself."""

    loss_fn: str
    config: dict[str, float]
    forward_only: bool
    custom: CustomLoss | None

    @classmethod
    def of(cls, loss_fn: str, config: Mapping[str, float | str], forward_only: bool, find: FindLoss) -> Head:
        """Raises BadRequest for a text among the settings, but for the loss_id of a custom loss, which it must have."""
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
        """The inputs the loss reads."""
        if self.custom is not None:
            return tuple(self.custom.columns)
        spec = LOSSES.get(self.loss_fn)
        return (*spec.inputs, *spec.optional) if spec else ()


def build_op(head: Head, tokens: Sequence[np.ndarray], inputs: Sequence[Mapping[str, pb.Tensor]]) -> ForwardBackward:
    """The Op of datums; what `head.taken` does not name is ignored.

    Raises BadRequest for a malformed tensor, an input only some datums have, and target_tokens that are not integers.
    """
    names = [name for name in head.taken if any(name in datum for datum in inputs)]
    columns = {name: _column(name, inputs, head.custom) for name in names}
    batch = Batch(Ragged.of(tokens, np.int32), columns)
    return ForwardBackward(batch, head.loss_fn, head.config, head.forward_only, head.custom)


def _column(name: str, inputs: Sequence[Mapping[str, pb.Tensor]], custom: CustomLoss | None) -> Ragged:
    missing = next((i for i, datum in enumerate(inputs) if name not in datum), None)
    if missing is not None:
        raise BadRequest(f"datum {missing}: {name} is missing, while other datums have it")
    tensors.check_unfolded([datum[name] for datum in inputs], name)
    arrays = [tensors.to_array(datum[name], f"datum {i}: {name}") for i, datum in enumerate(inputs)]
    if name == "target_tokens":
        return _targets(arrays)
    return Ragged.of(arrays, np.float32) if custom is None else _custom_column(name, arrays, custom.columns[name])


def _targets(arrays: Sequence[np.ndarray]) -> Ragged:
    for i, array in enumerate(arrays):
        if array.dtype.kind != "i":
            raise BadRequest(f"datum {i}: target_tokens are {array.dtype.name}; they must be integers")
    return Ragged.of(arrays, np.int64)


def _custom_column(name: str, arrays: Sequence[np.ndarray], rank: int) -> Ragged:
    """A custom loss sees integers as int64 and the rest as float32, as on the client; a scalar comes as one value."""
    kinds = [array.dtype.kind for array in arrays]
    if len(set(kinds)) > 1:
        other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
        raise BadRequest(f"datum {other}: {name} is {arrays[other].dtype.name}, but {arrays[0].dtype.name} in datum 0")
    shaped = [array.reshape(()) if rank == 0 and array.shape == (1,) else array for array in arrays]
    return Ragged.of(shaped, np.int64 if kinds[0] == "i" else np.float32)


def _to_op(request: pb.ForwardBackwardRequest, find: FindLoss) -> ForwardBackward:
    head = Head.of(request.loss_fn, _loss_config(request), request.forward_only, find)
    tokens = [_tokens(datum, i) for i, datum in enumerate(request.data)]
    return build_op(head, tokens, [datum.loss_fn_inputs for datum in request.data])


def _tokens(datum: pb.Datum, i: int) -> np.ndarray:
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise BadRequest(f"datum {i}: a {chunk.WhichOneof('chunk') or 'missing'} chunk; only text is supported")
    data = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    return tensors.buffer(data, _INT32, f"datum {i}: model_input")


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

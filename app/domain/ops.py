"""The typed Ops in a model's journal, the batch of a forward_backward, and the codec of their bytes. A live run, a
replay and a merged pass all get exactly these Ops.

Columns instead of a list of datums: checking, hashing and storing a 5 MB body takes only a handful of numpy calls.

The format is msgpack with three extension types: numpy arrays (dtype, shape, raw little-endian bytes); the tag that
marks a list as one of the dataclasses in `TYPES`, with its fields in order; and the version of an encoding that is
not the first. Decoding builds only these types, so nothing in a journal can run code.

The bytes of an encoded value must never change, so that its digest stays the same. Therefore a tag is independent of
the class name, even where the two are equal. Fields added after version 1 are left out while they have their
defaults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import msgpack
import numpy as np

from app.domain import losses, sampling
from app.domain.images import Image
from app.domain.losses import CustomLoss
from app.errors import NewerContent

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"

_ARRAY, _DATACLASS, _VERSION = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Ragged:
    """n arrays of one dtype and any shapes. `values` holds them end to end; `shapes` holds their shapes."""

    values: np.ndarray
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], dtype: type[np.generic] | np.dtype) -> Ragged:
        flat = [np.asarray(a, dtype=dtype).ravel() for a in arrays]
        values = np.concatenate(flat) if flat else np.empty(0, dtype=dtype)
        return cls(values, tuple(tuple(a.shape) for a in arrays))

    def __len__(self) -> int:
        return len(self.shapes)

    def offsets(self) -> list[int]:
        """n+1 element offsets into `values`, the first 0."""
        return [0, *accumulate(prod(s) for s in self.shapes)]

    def __iter__(self) -> Iterator[np.ndarray]:
        cuts = self.offsets()
        for start, stop, shape in zip(cuts, cuts[1:], self.shapes, strict=False):
            yield self.values[start:stop].reshape(shape)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of datums: `tokens` int32 [N_i]; `inputs` by name, each [N_i] or [N_i, K_i] (int64 target_tokens, else
    float32). `images` in the order of datums and positions; the tokens at their positions are 0.

    `routes`: the experts that a sampler chose for each token, as in app.domain.routes, each [N_i, layers, top_k]; None
    where the trainer's routers choose by themselves.
    """

    tokens: Ragged
    inputs: Mapping[str, Ragged]
    images: tuple[Image, ...] = ()
    routes: Ragged | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A LoRA adapter. `alpha / rank` scales its output; `seed` seeds the random A (B starts at zero)."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int = 0
    alpha: float = 32.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The specification of a model. `lora` is None for full fine-tuning. A `critic` returns a value for each token."""

    base_model: str
    lora: LoraSpec | None
    critic: bool = False


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with the names of torch.optim.AdamW. `grad_clip_norm` is the greatest global L2 norm; 0 means
    no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Creates a model; seq 0 of every model. `source` is a tinker:// path to start from, with its optimizer state if
    `optimizer`.

    `prefix` is the location of the path's files at the time of the call. A replay uses it, because the path may name
    other files later.
    """

    kind: ClassVar[str] = "create_model"
    spec: ModelSpec
    source: str | None = None
    optimizer: bool = False
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Adds the batch's gradient to the pending gradient; with `forward_only` it changes nothing.

    `custom` is the loss itself where `loss_fn` is custom, because its id may name another loss at the time of a replay.
    """

    batch: Batch
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False
    custom: CustomLoss | None = None

    @property
    def kind(self) -> str:
        return FORWARD if self.forward_only else FORWARD_BACKWARD


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Makes one AdamW step on the pending gradient. The pending gradient is zero afterwards."""

    kind: ClassVar[str] = "optim_step"
    params: AdamParams


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Writes a checkpoint. `sampling_session_id` is set for an ephemeral checkpoint, which has no public path.

    `merged`: writes the merged model (base and adapter) as a Hugging Face folder, not the adapter. `inflight`: the
    model's in-flight sampling sessions, this one and earlier ones, use these weights from now on. `recipients`: age
    public keys; only the holder of a matching secret key can read the files.
    """

    kind: ClassVar[str] = "save_weights"
    checkpoint_kind: str
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    sampling_session_id: str | None = None
    merged: bool = False
    inflight: bool = False
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Replaces weights, and the optimizer state if `optimizer` (else it is reset); pending gradients are dropped.

    `prefix` as in CreateModel.
    """

    kind: ClassVar[str] = "load_weights"
    source: str
    optimizer: bool
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class DropGradients:
    """Stands for a seq that never came (a gap). It drops the pending gradient, because its batch is incomplete."""

    kind: ClassVar[str] = "drop_gradients"


def as_asked(op: Op) -> Op:
    """The part of an Op that is equal in a repeat of its call. It leaves out the values that the server looked up. It
    also leaves out the sampling session's number, because the SDK draws a new one each time it sends the same save; the
    number of the first call stays valid, and the result names it."""
    if isinstance(op, SaveWeights) and op.sampling_session_id:
        return replace(op, sampling_session_id="")
    if isinstance(op, ForwardBackward) and op.batch.routes is not None:
        return replace(op, batch=replace(op.batch, routes=None))
    return replace(op, prefix="") if isinstance(op, CreateModel | LoadWeights) else op


Op = CreateModel | ForwardBackward | OptimStep | SaveWeights | LoadWeights | DropGradients


# Tag -> class, and its number of fields in version 1. Those fields are always written. More fields may be added after
# them, each with a default. A tag is never reused for another class.
TYPES: Mapping[str, tuple[type, int]] = {
    "Ragged": (Ragged, 2),
    "Batch": (Batch, 2),
    "Image": (Image, 5),
    "LossInput": (losses.LossInput, 3),
    "LossCall": (losses.LossCall, 5),
    "CustomLoss": (losses.CustomLoss, 5),
    "LoraSpec": (LoraSpec, 6),
    "ModelSpec": (ModelSpec, 3),
    "AdamParams": (AdamParams, 6),
    "CreateModel": (CreateModel, 4),
    "ForwardBackward": (ForwardBackward, 5),
    "OptimStep": (OptimStep, 1),
    "SaveWeights": (SaveWeights, 9),
    "LoadWeights": (LoadWeights, 3),
    "DropGradients": (DropGradients, 0),
    "Cells": (sampling.Cells, 4),
    "SampleRequest": (sampling.SampleRequest, 17),
}


@dataclass(frozen=True, slots=True)
class _Tag:
    """The first element of a list that represents a dataclass. No request can hold a tag, as it is an extension
    type."""

    name: str


class Codec:
    """Encodes and decodes the types of `types`. TYPES holds the types that this version knows."""

    def __init__(self, types: Mapping[str, tuple[type, int]]) -> None:
        self._types = types
        self._tags = {known: tag for tag, (known, _) in types.items()}

    def encode(self, value: Any) -> bytes:
        """Bytes for an Op or a SampleRequest; equal values give equal bytes."""
        data: bytes = msgpack.packb(value, default=self._plain, strict_types=True)
        return data

    def decode(self, data: bytes) -> Any:
        """The inverse of `encode`; arrays are read-only views.

        Raises NewerContent for bytes that only a newer version can have written, and ValueError or TypeError for any
        other invalid bytes.
        """
        return msgpack.unpackb(data, ext_hook=_extension, list_hook=self._value, strict_map_key=False)

    def _plain(self, value: Any) -> Any:
        """Converts a value one level deep to types that msgpack packs itself. Nested packing would copy a batch once
        for each level."""
        if isinstance(value, np.ndarray):
            head = msgpack.packb((value.dtype.str, value.shape))
            return msgpack.ExtType(
                _ARRAY, b"".join((head, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data))
            )
        if isinstance(value, tuple):  # with strict_types, msgpack passes tuples to this function
            return list(value)
        tag = self._tags.get(type(value))
        if tag is None:
            raise TypeError(f"a value of type {type(value).__name__} cannot be written to the journal")
        return [msgpack.ExtType(_DATACLASS, tag.encode()), *(_sorted(part) for part in self._parts(value, tag))]

    def _parts(self, value: Any, tag: str) -> list[Any]:
        """The values of the fields, without trailing fields that were added after version 1 and have their defaults."""
        present = fields(value)
        parts = [getattr(value, field.name) for field in present]
        least = self._types[tag][1]
        while len(parts) > least and self.encode(parts[-1]) == self.encode(_default(present[len(parts) - 1])):
            parts.pop()
        return parts

    def _value(self, items: list[Any]) -> Any:
        if not items or not isinstance(items[0], _Tag):
            return tuple(items)
        tag = items[0].name
        if tag not in self._types:
            raise NewerContent(f"this version of Tinsmith does not know the type {tag[:100]!r}")
        known = self._types[tag][0]
        if len(items) - 1 > len(fields(known)):
            raise NewerContent(
                f"{tag} has {len(items) - 1} fields; this version of Tinsmith knows {len(fields(known))} of them"
            )
        return known(*items[1:])


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _extension(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        unpacker = msgpack.Unpacker(use_list=False)
        unpacker.feed(data[:256])
        dtype, shape = unpacker.unpack()
        return np.frombuffer(data, dtype=dtype, offset=unpacker.tell()).reshape(shape)
    if code == _DATACLASS:
        return _Tag(data.decode())
    if code == _VERSION:
        raise NewerContent(f"this version of Tinsmith reads version 1 of the encoding, not {data[:100]!r}")
    raise NewerContent(f"this version of Tinsmith does not know the extension type {code}")


def _sorted(value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


_codec = Codec(TYPES)
encode, decode = _codec.encode, _codec.decode


def digest(encoded: bytes) -> str:
    """The identity of an Op's content: the sha256 of its encoding, so it does not depend on the wire format."""
    return hashlib.sha256(encoded).hexdigest()


def is_newer(data: bytes) -> bool:
    """True when `decode` would raise NewerContent. Other errors do not count here; they appear when the Op runs."""
    try:
        decode(data)
    except NewerContent:
        return True
    except Exception:
        return False
    return False

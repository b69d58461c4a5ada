"""Ops to bytes and back: what the journal stores, what a digest is taken over, what ranks send each other.

msgpack with two extension types: numpy arrays (dtype, shape, raw little-endian bytes), and the tag that makes a list
one of the dataclasses in `_TYPES`, by field order. Decoding builds only those, so nothing in a journal can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgpack
import numpy as np

from app.domain import batch, custom_losses, ops, sampling

_ARRAY, _DATACLASS = 1, 2
_TYPES: dict[str, type] = {
    t.__name__: t
    for t in (
        batch.Ragged,
        batch.Batch,
        custom_losses.LossInput,
        custom_losses.LossCall,
        custom_losses.CustomLoss,
        ops.LoraSpec,
        ops.ModelSpec,
        ops.AdamParams,
        ops.CreateModel,
        ops.ForwardBackward,
        ops.OptimStep,
        ops.SaveWeights,
        ops.LoadWeights,
        ops.DropGradients,
        sampling.Cells,
        sampling.SampleRequest,
    )
}


def encode(value: Any) -> bytes:
    """Bytes for an Op or a SampleRequest; equal values give equal bytes."""
    data: bytes = msgpack.packb(value, default=_plain, strict_types=True)
    return data


def decode(data: bytes) -> Any:
    """The inverse of `encode`; arrays are read-only views. Raises ValueError on anything else."""
    return msgpack.unpackb(data, ext_hook=_extension, list_hook=_value, strict_map_key=False)


def digest(encoded: bytes) -> str:
    """The identity of an Op's content: sha256 over its encoding, so the wire format does not matter."""
    return hashlib.sha256(encoded).hexdigest()


@dataclass(frozen=True, slots=True)
class _Tag:
    """The first element of a list that stands for a dataclass. No request can hold one: it is an extension type."""

    name: str


def _plain(value: Any) -> Any:
    """What msgpack can pack itself, one level down; nested packing would copy a batch once a level."""
    if isinstance(value, np.ndarray):
        head = msgpack.packb((value.dtype.str, value.shape))
        return msgpack.ExtType(_ARRAY, b"".join((head, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)))
    if isinstance(value, tuple):  # strict_types sends tuples here
        return list(value)
    name = type(value).__name__
    if is_dataclass(value) and _TYPES.get(name) is type(value):
        return [msgpack.ExtType(_DATACLASS, name.encode()), *(_sorted(getattr(value, f.name)) for f in fields(value))]
    raise TypeError(f"{name} has no place in a journal")


def _sorted(value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


def _extension(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        unpacker = msgpack.Unpacker(use_list=False)
        unpacker.feed(data[:256])
        dtype, shape = unpacker.unpack()
        return np.frombuffer(data, dtype=dtype, offset=unpacker.tell()).reshape(shape)
    if code == _DATACLASS:
        return _Tag(data.decode())
    raise ValueError(f"unknown extension type {code}")


def _value(items: list[Any]) -> Any:
    if items and isinstance(items[0], _Tag):
        return _TYPES[items[0].name](*items[1:])
    return tuple(items)

"""Encodes Ops to bytes and decodes them. The journal stores these bytes, digests are taken over them, and ranks send
them to each other.

The format is msgpack with three extension types: numpy arrays (dtype, shape, raw little-endian bytes); the tag that
marks a list as one of the dataclasses in `TYPES`, with its fields in order; and the version of an encoding that is not
the first. Decoding builds only these types, so nothing in a journal can run code.

The bytes of an encoded value must never change, so that its digest stays the same. Therefore a tag is independent of
the class name, even where the two are equal. Fields added after version 1 are left out while they have their defaults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

import msgpack
import numpy as np

from app.domain import batch, custom_losses, ops, sampling
from app.errors import NewerContent

_ARRAY, _DATACLASS, _VERSION = 1, 2, 3

# Tag -> class, and its number of fields in version 1. Those fields are always written. More fields may be added after
# them, each with a default. A tag is never reused for another class.
TYPES: Mapping[str, tuple[type, int]] = {
    "Ragged": (batch.Ragged, 2),
    "Batch": (batch.Batch, 2),
    "LossInput": (custom_losses.LossInput, 3),
    "LossCall": (custom_losses.LossCall, 5),
    "CustomLoss": (custom_losses.CustomLoss, 5),
    "LoraSpec": (ops.LoraSpec, 6),
    "ModelSpec": (ops.ModelSpec, 3),
    "AdamParams": (ops.AdamParams, 6),
    "CreateModel": (ops.CreateModel, 4),
    "ForwardBackward": (ops.ForwardBackward, 5),
    "OptimStep": (ops.OptimStep, 1),
    "SaveWeights": (ops.SaveWeights, 9),
    "LoadWeights": (ops.LoadWeights, 3),
    "DropGradients": (ops.DropGradients, 0),
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


def _sorted(value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


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

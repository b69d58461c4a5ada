"""Calls as a newer version of Tinsmith journals them, and that version itself."""

from __future__ import annotations

from dataclasses import fields

import msgpack
import pytest

from app.domain import ops
from app.domain.ops import OptimStep
from app.domain.sampling import SampleRequest

# It knows both under tags that this version has never heard of.
_NEWER = ops.Codec({**ops.TYPES, "NewStep": (OptimStep, 1), "NewRequest": (SampleRequest, 17)})


def encode(value: OptimStep | SampleRequest) -> bytes:
    return _NEWER.encode(value)


def in_another_version(value: OptimStep | SampleRequest) -> bytes:
    return msgpack.packb([msgpack.ExtType(3, b"2"), ops.encode(value)])


def with_a_further_field(value: OptimStep | SampleRequest) -> bytes:
    written = msgpack.unpackb(ops.encode(value))
    left_out = [field.default for field in fields(value)[len(written) - 1 :]]
    return msgpack.packb([*written, *left_out, "set"])


WAYS = pytest.mark.parametrize("write", [encode, in_another_version, with_a_further_field])


def upgrade(patch: pytest.MonkeyPatch) -> None:
    """From now on every worker of this process is of the newer version."""
    patch.setattr(ops, "decode", _NEWER.decode)

"""Calls of a backend as bytes, for the other ranks of its group: the journal's codec plus Create and Load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.domain import codec
from workers.training.base import BackendOp, Create, Load

Call = tuple[Any, ...]
"""A method's name, then its arguments."""


def encode_apply(ops: Mapping[str, BackendOp]) -> bytes:
    return codec.encode(["apply", [[model_id, _pack(op)] for model_id, op in ops.items()]])


def encode_call(method: str, *arguments: str | bool) -> bytes:
    return codec.encode([method, *arguments])


def decode(data: bytes) -> Call:
    """The inverse of both; an apply's Ops come back as a dict in their order."""
    method, *arguments = codec.decode(data)
    if method == "apply":
        return method, {model_id: _unpack(packed) for model_id, packed in arguments[0]}
    return method, *arguments


def _pack(op: BackendOp) -> list[Any]:
    match op:
        case Create():
            return ["create", op.lora, None if op.source is None else str(op.source), op.optimizer, op.critic]
        case Load():
            return ["load", str(op.source), op.optimizer]
        case _:
            return ["op", op]


def _unpack(packed: tuple[Any, ...]) -> BackendOp:
    match packed:
        case ("create", lora, source, optimizer, critic):
            return Create(lora, None if source is None else Path(source), optimizer, critic)
        case ("load", source, optimizer):
            return Load(Path(source), optimizer)
        case (_, op):
            return op  # type: ignore[no-any-return]
    raise ValueError(f"not a packed Op: {packed[:1]!r}")

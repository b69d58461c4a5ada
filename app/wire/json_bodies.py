"""Reads the JSON form of a batch (SDKs up to 0.24), of a model input and of a tensor."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.domain.ops import ForwardBackward
from app.errors import BadRequest
from app.wire import tinker_pb2 as pb
from app.wire.forward_backward import BatchHeader, Envelope, FindLoss, build_op
from app.wire.images import ModelInput, columns

_FORWARD = "forward_input"
_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


def open_envelope(body: Any) -> Envelope:
    """Reads the envelope of a JSON body. Raises BadRequest when model_id or seq_id is missing; `decode` checks the
    rest."""
    if not isinstance(body, dict) or not isinstance(body.get("model_id"), str):
        raise BadRequest("model_id must be a string")
    seq = body.get("seq_id")
    if not isinstance(seq, int) or isinstance(seq, bool):
        raise BadRequest(f"seq_id must be an integer (got {str(seq)[:80]!r})")
    content = body.get(_input_of(body))
    data = content.get("data") if isinstance(content, dict) else None
    datums = len(data) if isinstance(data, list) else 0
    no_spans = [()] * datums  # these SDKs send none
    return Envelope(body["model_id"], seq, _FORWARD in body, datums, lambda find: _to_op(body, find), lambda: no_spans)


def model_input(chunks: Any, what: str, datum: int = 0) -> ModelInput:
    """The chunks of a prompt or datum. Raises BadRequest for chunks that are neither text nor images, and for tokens
    that are not int32."""
    found = ModelInput(what, datum)
    for chunk in _list(chunks, what):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else type(chunk).__name__
        if kind == "encoded_text":
            found.add_text(_chunk_tokens(chunk, what))
        elif kind == "image":
            found.add_image(*_chunk_image(chunk, what))
        elif kind == "image_asset_pointer":
            raise BadRequest(
                f"{what}: chunk type image_asset_pointer is not supported, because this server opens no file or URL "
                "that a request names: read the file yourself, and send its bytes as an image chunk"
            )
        else:
            raise BadRequest(
                f"{what}: chunk type {str(kind)[:40]!r} is not supported; send encoded_text or image chunks"
            )
    return found


def _chunk_image(chunk: Mapping[str, Any], what: str) -> tuple[bytes, str, int | None]:
    """Data, format and expected_tokens of an image chunk."""
    data, expected = chunk.get("data"), chunk.get("expected_tokens")
    if expected is not None and type(expected) is not int:
        raise BadRequest(f"{what}: expected_tokens of an image must be an integer")
    if not isinstance(data, str):
        raise BadRequest(f"{what}: data of an image must be a base64 string")
    try:
        return base64.b64decode(data, validate=True), str(chunk.get("format")), expected
    except (binascii.Error, ValueError):
        raise BadRequest(f"{what}: data of an image is not valid base64") from None


def _chunk_tokens(chunk: Mapping[str, Any], what: str) -> np.ndarray:
    values = _numbers(chunk.get("tokens"), f"{what}: tokens")
    if values.size and values.dtype.kind != "i":
        raise BadRequest(f"{what}: tokens must be a list of integers")
    if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
        raise BadRequest(f"{what}: token {max(values, key=abs)} is not a 32-bit integer")
    return values.astype(np.int32)


def _to_op(body: Mapping[str, Any], find: FindLoss) -> ForwardBackward:
    forward_only, name = _FORWARD in body, _input_of(body)
    content = body.get(name)
    if not isinstance(content, dict) or not isinstance(content.get("loss_fn"), str):
        raise BadRequest(f"{name} must be an object with data and loss_fn")
    data = _list(content.get("data"), "data")
    head = BatchHeader.of(content["loss_fn"], _loss_config(content.get("loss_fn_config")), forward_only, find)
    tokens, images = columns(_model_input(datum, i) for i, datum in enumerate(data))
    return build_op(head, tokens, images, [_inputs(datum, head.taken, i) for i, datum in enumerate(data)])


def _input_of(body: Mapping[str, Any]) -> str:
    return _FORWARD if _FORWARD in body else "forward_backward_input"


def _model_input(datum: Any, i: int) -> ModelInput:
    if not isinstance(datum, dict) or not isinstance(datum.get("model_input"), dict):
        raise BadRequest(f"datum {i}: model_input must be an object with chunks")
    return model_input(datum["model_input"].get("chunks"), f"datum {i}: model_input", i)


def _inputs(datum: Mapping[str, Any], names: Sequence[str], i: int) -> dict[str, pb.Tensor]:
    given = datum.get("loss_fn_inputs")
    if not isinstance(given, dict):
        raise BadRequest(f"datum {i}: loss_fn_inputs must be an object")
    return {name: tensor(given[name], f"datum {i}: {name}") for name in names if name in given}


def tensor(given: Any, what: str) -> pb.Tensor:
    """Converts a JSON tensor to the message of a protobuf body, so that shapes and sparse rows are checked in one
    place.

    Raises BadRequest for a value that is not a tensor; `what` names it there.
    """
    if not isinstance(given, dict) or str(given.get("dtype")) not in _DTYPES:
        raise BadRequest(f"{what}: expected data, shape and a dtype of {', '.join(_DTYPES)}")
    name = given["dtype"]
    message = pb.Tensor(dtype=_DTYPES[name], shape=_sizes(given.get("shape") or [], what))
    data = _bytes(given.get("data"), _NUMPY[name], what)
    if given.get("sparse_crow_indices") is None:
        message.dense = data
    else:
        message.sparse_csr.values = data
        message.sparse_csr.crow_indices = _bytes(given["sparse_crow_indices"], _NUMPY["int64"], what)
        message.sparse_csr.col_indices = _bytes(given.get("sparse_col_indices"), _NUMPY["int64"], what)
    return message


def _sizes(given: Any, what: str) -> list[int]:
    sizes = _list(given, what)
    if not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
        raise BadRequest(f"{what}: shape must be a list of sizes")
    return sizes


def _bytes(given: Any, dtype: np.dtype, what: str) -> bytes:
    values = _numbers(given, what)
    if values.size and dtype.kind == "i" and values.dtype.kind != "i":
        raise BadRequest(f"{what}: the values must be integers")
    return values.astype(dtype).tobytes()


def _numbers(given: Any, what: str) -> np.ndarray:
    try:
        values = np.array(_list(given, what) or np.empty(0))
    except ValueError:
        raise BadRequest(f"{what}: expected a flat list of numbers") from None
    if values.ndim != 1 or values.dtype.kind not in "if":
        raise BadRequest(f"{what}: expected a flat list of numbers")
    return values


def _list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list):
        raise BadRequest(f"{what}: expected a list, got {type(given).__name__}")
    return given


def _loss_config(given: Any) -> dict[str, float | str]:
    config = given or {}
    if not isinstance(config, dict):
        raise BadRequest("loss_fn_config must be an object")
    for key, value in config.items():
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise BadRequest(f"loss_fn_config {key[:80]!r} must be a number")
    try:
        return {key: value if isinstance(value, str) else float(value) for key, value in config.items()}
    except OverflowError:
        raise BadRequest("loss_fn_config holds a number beyond 1e308") from None

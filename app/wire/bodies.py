"""Unpacks and parses the body of a request, and reads the JSON form of a batch (SDKs up to 0.24), of a model input and
of a tensor.

Limits on a body's cost are checked first, so that few bytes cannot take much memory.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import zstandard

from app.domain.ops import Batch, ForwardBackward
from app.errors import BadRequest, TooLarge, Unavailable
from app.settings import LimitSettings
from app.wire import tinker_pb2 as pb
from app.wire.forward_backward import BatchHeader, Envelope, FindLoss, build_op
from app.wire.images import ModelInput, columns

# RFC 8878 asks every decoder to support this window; it is also the zstd program's limit without --long.
_WINDOW = 2**23
_PIECE = 2**16
_VARINT, _LENGTH = 0, 2
"""Wire types of protobuf: a number, and bytes with their length before them."""
_DATA = 3 << 3 | _LENGTH
"""The tag of a datum in a ForwardBackwardRequest."""
VALUES_EACH_PART = 4
"""The number of JSON values that use as much memory as one nested message."""
_FIELDS_EACH_VALUE = 2
"""Most fields of a body for each value that it may hold. A body within the other limits has at most 1.8: a sparse
tensor is 5 values in 9 fields."""
_RAISE_VALUES = "a tensor with many empty places as sparse rows, or ask the operator to raise limits.json_values"
_CONTINUED = bytes(range(128, 256))
"""The bytes of a packed number behind which it goes on."""

_Layout = dict[int, Any]
"""The tags of a message's fields that hold messages, with the layout of each, or lists of numbers, with None."""


def _layout_of(message: Any) -> _Layout:
    """The layout of the messages of a descriptor."""
    found: _Layout = {}
    for field in message.fields:
        if field.message_type:
            found[field.number << 3 | _LENGTH] = _layout_of(field.message_type)
        elif field.is_repeated:
            found |= {field.number << 3 | kind: None for kind in (_LENGTH, _VARINT)}
    return found


_REQUEST = _layout_of(pb.ForwardBackwardRequest.DESCRIPTOR)
_FORWARD = "forward_input"
_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


class ByteBudget:
    """The number of bytes that all threads of a process hold of one kind."""

    def __init__(self) -> None:
        self._held = 0
        self._lock = threading.Lock()

    def take(self, size: int, most: int) -> None:
        """Adds bytes. Raises Unavailable where all threads would hold more than `most`."""
        with self._lock:
            if self._held + size > most:
                raise Unavailable("the server unpacks many large bodies at present; try again soon")
            self._held += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._held -= size


def unpack(body: bytes, encoding: str, most: int, take: Callable[[int], None] | None = None) -> bytes:
    """Removes the Content-Encoding of a body: none, or zstd in one frame. Never holds more than `most` unpacked bytes,
    and calls `take` with their number before they take memory.

    Raises TooLarge for more bytes than that, BadRequest for any other encoding or a broken frame, and the errors of
    `take`.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding[:80]!r} is not supported: send the body as it is, or zstd")
    try:
        said = zstandard.frame_content_size(body)
        # A frame that states its size is unpacked straight into a buffer of that size, so its window may have any size.
        # Of one that says 0, zstandard would read nothing, nor what is behind it.
        unpacker = zstandard.ZstdDecompressor(max_window_size=0 if said > 0 else _WINDOW)
        size = said if said > 0 else _measured(unpacker, body, most)
        if size > most:
            raise TooLarge(
                f"the body has at least {size} bytes when unpacked; at most {most} are allowed: send less in one call"
            )
        if take:
            take(size)
        if said > 0:
            return unpacker.decompress(body, allow_extra_data=False)
        return _whole(unpacker, body)
    except zstandard.ZstdError:
        raise BadRequest(
            f"the body of {len(body)} bytes is not one complete zstd frame, or its header does not state the unpacked "
            f"size and its window is larger than {_WINDOW} bytes; compress it again in one frame that states the size"
        ) from None


def _measured(unpacker: zstandard.ZstdDecompressor, body: bytes, most: int) -> int:
    """The size of a frame that does not state it, up to `most` plus one piece. The frame is unpacked piece by piece to
    count its bytes, and a second time later."""
    size = 0
    with unpacker.stream_reader(body) as reader:
        while size <= most and (piece := reader.read(_PIECE)):
            size += len(piece)
    return size


def _whole(unpacker: zstandard.ZstdDecompressor, body: bytes) -> bytes:
    """Unpacks a frame that is known to fit. Raises ZstdError for half a frame, or more than one."""
    frame = unpacker.decompressobj()
    unpacked = frame.decompress(body)
    if not frame.eof or frame.unused_data:
        raise zstandard.ZstdError("not one whole frame")
    return unpacked


def parse_json(body: bytes, limits: LimitSettings, most: int | None = None) -> Any:
    """Parses a JSON body. Raises TooLarge for more than `most` values, by default `limits.json_values`, and BadRequest
    for too deep nesting, and for what is not JSON."""
    most = limits.json_values if most is None else most
    # Marks inside strings count as well.
    values = sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))
    if values > most:
        said = f"the JSON body holds about {values} values; at most {most} are allowed in one call: send less at a time"
        raise TooLarge(said if most < limits.json_values else f"{said}, {_RAISE_VALUES}")
    try:
        found = json.loads(body)
    except ValueError:
        raise BadRequest(f"the body of {len(body)} bytes is not valid JSON") from None
    # Most bodies have too few brackets to be deep; this test avoids a walk over a prompt's tokens one by one.
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        _check_depth(found, limits)
    return found


def check_parts(body: bytes, limits: LimitSettings) -> None:
    """Raises TooLarge for a ForwardBackwardRequest that would become too many objects: datums, chunks and inputs, each
    of which may be two bytes, and the messages and numbers inside them. The parser refuses malformed bodies, where the
    count ends."""
    most = left = limits.json_values // VALUES_EACH_PART
    with suppress(IndexError):
        for tag, start, end in _fields(body, 0, len(body)):
            left -= 1 + (sum(1 for _ in islice(_fields(body, start, end), left)) if tag == _DATA else 0)
            if left < 0:
                raise TooLarge(f"the body holds more than {most} parts of datums; send fewer datums in one call")
    left, fields = limits.json_values, _FIELDS_EACH_VALUE * limits.json_values
    with suppress(IndexError):
        for place, count in enumerate(_values(body, 0, len(body), _REQUEST)):
            left -= count
            if left < 0:
                raise TooLarge(f"the body holds more than {limits.json_values} values; send less in one call")
            if place == fields:
                raise TooLarge(f"the body holds more than {fields} fields; send less in one call")


def _values(body: bytes, place: int, end: int, layout: _Layout) -> Iterator[int]:
    """Yields how many values each field brings: 1 for a message, any number for a list of numbers, and 0 for any other.
    A value may be one or two bytes and takes up to 40 once it is parsed: the parser's arena also keeps the messages
    that a later one of the same `oneof` replaces."""
    for tag, start, stop in _fields(body, place, end):
        if tag not in layout:
            yield 0
            continue
        inside = layout[tag]
        if inside is None:
            yield len(body[start:stop].translate(None, _CONTINUED))
        else:
            yield 1
            yield from _values(body, start, stop, inside)


def _check_depth(value: Any, limits: LimitSettings) -> None:
    """Raises BadRequest for a value nested so deeply that a later reader might fail on it."""
    level = [value]
    for _ in range(limits.json_depth):
        level = [part for outer in level for part in _parts(outer) if isinstance(part, dict | list)]
        if not level:
            return
    raise BadRequest(f"the JSON body is nested too deeply; at most {limits.json_depth} levels are allowed")


def check_datums(count: int, limits: LimitSettings) -> None:
    """Raises BadRequest for more datums than one call may bring."""
    if count > limits.datums:
        raise BadRequest(f"data holds {count} datums; at most {limits.datums} are allowed in one call")


def check_batch(batch: Batch, limits: LimitSettings) -> None:
    """Raises BadRequest for more tokens than one call may bring."""
    tokens = batch.tokens.values.size
    if tokens > limits.batch_tokens:
        raise BadRequest(f"data holds {tokens} tokens; at most {limits.batch_tokens} are allowed in one call")


def _fields(body: bytes, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (tag, start, end) of every field in a protobuf message, so that callers count each. The tag is 0 for a
    field of fixed size, and for a group and its contents: no message here has one. Raises IndexError where the message
    ends too soon."""
    groups = 0
    while place < end:
        tag, place = _varint(body, place)
        kind, start = tag & 7, place
        if kind == _LENGTH:
            size, start = _varint(body, place)
            place = start + size
            if place > end:
                raise IndexError
        elif kind == _VARINT:
            _, place = _varint(body, place)
        else:
            place += {1: 8, 5: 4}.get(kind, 0)
            groups += {3: 1, 4: -1}.get(kind, 0)
            tag = 0
        yield 0 if groups else tag, start, place


def _varint(body: bytes, place: int) -> tuple[int, int]:
    """(number, position after it). Raises IndexError at the end of the body, and for a number of more than 64 bits."""
    number = shift = 0
    while shift < 64:
        byte = body[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7
    raise IndexError


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


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

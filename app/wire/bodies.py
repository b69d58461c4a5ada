"""Unpacks and parses the body of a request within limits. They are checked first, so that few bytes cannot take much
memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import zstandard

from app.domain.ops import Batch
from app.errors import BadRequest, TooLarge, Unavailable
from app.settings import LimitSettings
from app.wire import tinker_pb2 as pb

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

"""Unpacks and parses a body within limits on its cost. They are checked first, so that few bytes cannot take much
memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import zstandard

from app.domain.ops import Batch
from app.errors import BadRequest, TooLarge
from app.settings import LimitSettings

# RFC 8878 asks every decoder to support this window; it is also the zstd program's limit without --long.
_WINDOW = 2**23
_PIECE = 2**16
_DATA = 3
"""Number of the field of a ForwardBackwardRequest that holds its datums."""
_PART = 4
"""The number of JSON values that use as much memory as one nested message."""


def unpack(body: bytes, encoding: str, most: int) -> bytes:
    """Removes the Content-Encoding of a body: none, or zstd in one frame. Never holds more than `most` unpacked bytes.

    Raises TooLarge for more bytes than that, BadRequest for any other encoding or a broken frame.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding[:80]!r} is not supported: send the body as it is, or zstd")
    try:
        said = zstandard.frame_content_size(body)
        # A frame that states its size is unpacked straight into a buffer of that size, so its window may have any size.
        unpacker = zstandard.ZstdDecompressor(max_window_size=0 if said >= 0 else _WINDOW)
        size = said if said >= 0 else _measured(unpacker, body, most)
        if size > most:
            raise TooLarge(f"the body has at least {size} bytes when unpacked; {most} are taken: send less at a time")
        if said >= 0:
            return unpacker.decompress(body, allow_extra_data=False)
        return _whole(unpacker, body)
    except zstandard.ZstdError:
        raise BadRequest(
            f"the body of {len(body)} bytes is not one whole zstd frame, or does not say its content's size and has a "
            f"window of more than {_WINDOW} bytes"
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


def parse_json(body: bytes, limits: LimitSettings) -> Any:
    """Parses a JSON body. Raises TooLarge for too many values, BadRequest for too deep nesting, and for what is not
    JSON."""
    _check_values(body, limits)
    try:
        found = json.loads(body)
    except ValueError:
        raise BadRequest(f"the body of {len(body)} bytes is not valid JSON") from None
    # Most bodies have too few brackets to be deep; this test avoids a walk over a prompt's tokens one by one.
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        _check_depth(found, limits)
    return found


def _check_values(body: bytes, limits: LimitSettings) -> None:
    """Raises TooLarge for JSON that would become too many objects. Marks inside strings count as well."""
    values = sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))
    if values > limits.json_values:
        raise TooLarge(f"the JSON body holds about {values} values; at most {limits.json_values} are taken at a time")


def check_parts(body: bytes, limits: LimitSettings) -> None:
    """Raises TooLarge for a ForwardBackwardRequest that would become too many objects: datums, chunks and inputs, each
    of which may be two bytes. The parser refuses malformed bodies."""
    most = left = limits.json_values // _PART
    with suppress(IndexError):
        for number, start, end in _fields(body, 0, len(body)):
            left -= 1 + (sum(1 for _ in islice(_fields(body, start, end), left)) if number == _DATA else 0)
            if left < 0:
                raise TooLarge(f"the body holds more than {most} parts of datums; send fewer at a time")


def _check_depth(value: Any, limits: LimitSettings) -> None:
    """Raises BadRequest for a value nested so deeply that a later reader might fail on it."""
    level = [value]
    for _ in range(limits.json_depth):
        level = [part for outer in level for part in _parts(outer) if isinstance(part, dict | list)]
        if not level:
            return
    raise BadRequest(f"the JSON body is nested too deeply; at most {limits.json_depth} levels are taken")


def check_datums(count: int, limits: LimitSettings) -> None:
    """Raises BadRequest for more datums than one call may bring."""
    if count > limits.datums:
        raise BadRequest(f"data holds {count} datums; at most {limits.datums} are taken at a time")


def check_batch(batch: Batch, limits: LimitSettings) -> None:
    """Raises BadRequest for more tokens than one call may bring."""
    tokens = batch.tokens.values.size
    if tokens > limits.batch_tokens:
        raise BadRequest(f"data holds {tokens} tokens; at most {limits.batch_tokens} are taken at a time")


def _fields(body: bytes, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, start, end) of every string or message field in a protobuf message. Raises IndexError where the
    message ends too soon."""
    while place < end:
        tag, place = _varint(body, place)
        kind = tag & 7
        if kind == 2:
            size, place = _varint(body, place)
            yield tag >> 3, place, place + size
            place += size
        elif kind == 0:
            _, place = _varint(body, place)
        else:
            place += {1: 8, 5: 4}.get(kind, 0)


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

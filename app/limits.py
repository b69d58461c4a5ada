"""What a body may cost. Checked before it is unpacked or parsed, so that few bytes can not take much memory."""

from __future__ import annotations

from typing import Any

import zstandard

from app.domain.batch import Batch
from app.errors import BadRequest, TooLarge
from app.settings import LimitSettings

# What every decoder is asked to support (RFC 8878), and the zstd program's limit unless told otherwise (--long).
_WINDOW = 2**23
_PIECE = 2**16


def unpack(body: bytes, encoding: str, most: int) -> bytes:
    """The body without its Content-Encoding: none, or zstd in one frame. Never holds more than `most` bytes of it.

    Raises TooLarge for more than those, BadRequest for anything else.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding[:80]!r} is not supported: send the body as it is, or zstd")
    try:
        said = zstandard.frame_content_size(body)
        # One that says its size is unpacked into its place, whatever its window.
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
    """The size of a frame that does not say it, up to `most` and a piece: unpacked once more, bit by bit."""
    size = 0
    with unpacker.stream_reader(body) as reader:
        while size <= most and (piece := reader.read(_PIECE)):
            size += len(piece)
    return size


def _whole(unpacker: zstandard.ZstdDecompressor, body: bytes) -> bytes:
    """What a frame of a size that is known to fit holds. Raises ZstdError for half a frame, or more than one."""
    frame = unpacker.decompressobj()
    unpacked = frame.decompress(body)
    if not frame.eof or frame.unused_data:
        raise zstandard.ZstdError("not one whole frame")
    return unpacked


def check_values(body: bytes, limits: LimitSettings) -> None:
    """Raises TooLarge for JSON that would become too many objects. Marks within texts count as well."""
    values = sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))
    if values > limits.json_values:
        raise TooLarge(f"the JSON body holds about {values} values; at most {limits.json_values} are taken at a time")


def check_depth(value: Any, limits: LimitSettings) -> None:
    """Raises BadRequest for what later, deeper in the stack, might not be read again."""
    level = [value]
    for _ in range(limits.json_depth):
        level = [part for outer in level for part in _parts(outer) if isinstance(part, dict | list)]
        if not level:
            return
    raise BadRequest(f"the JSON body is nested too deeply; at most {limits.json_depth} levels are taken")


def check_batch(batch: Batch, limits: LimitSettings) -> None:
    """Raises BadRequest for more datums or tokens than one call may bring."""
    if len(batch) > limits.datums:
        raise BadRequest(f"data holds {len(batch)} datums; at most {limits.datums} are taken at a time")
    tokens = batch.tokens.values.size
    if tokens > limits.batch_tokens:
        raise BadRequest(f"data holds {tokens} tokens; at most {limits.batch_tokens} are taken at a time")


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

"""What a body may cost. Checked before it is unpacked or parsed, so that few bytes can not take much memory."""

from __future__ import annotations

from typing import Any

import zstandard

from app.domain.batch import Batch
from app.errors import BadRequest, TooLarge
from app.settings import LimitSettings


def unpack(body: bytes, encoding: str, most: int) -> bytes:
    """The body without its Content-Encoding: none, or zstd in one frame that says how large it is, as the SDK's does.

    So it is known what it takes before any of it is unpacked. Raises TooLarge for more than `most` bytes, BadRequest.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding[:80]!r} is not supported: send the body as it is, or zstd")
    try:
        size = zstandard.frame_content_size(body)
        if size > most:
            raise TooLarge(f"the body has {size} bytes when unpacked; at most {most} are taken, so send less at a time")
        if size >= 0:
            return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError:
        pass
    raise BadRequest(f"the body of {len(body)} bytes is not one whole zstd frame with its content's size in its head")


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

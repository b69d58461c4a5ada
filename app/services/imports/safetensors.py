"""Reads and checks the header of a safetensors file, without its tensors.

The format: 8 bytes with the length of the header (little-endian), the header (JSON), and the tensors end to end. The
header maps a tensor's name to its dtype, its shape, and the place of its bytes (`data_offsets`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from app.errors import BadRequest

MOST_HEADER = 100_000_000
"""The safetensors library refuses longer headers."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of one number, by the accepted dtypes."""
_LENGTH_BYTES, _MOST_DIMENSIONS = 8, 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its shape, and the bytes [start, end) of the file's data."""

    shape: tuple[int, ...]
    start: int
    end: int


def read_shapes(file: Path, most_header: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in the file. Raises BadRequest unless the file is valid to its last byte: its header has
    at most `most_header` bytes, every tensor is fp32, fp16 or bf16, and the tensors fill the file without a gap or an
    overlap."""
    header, size = _header(file, most_header)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(file, f"its {_METADATA} is not an object of strings")
    entries = {name: _entry(file, name, found) for name, found in header.items()}
    _check_filled(file, entries, size)
    return {name: entry.shape for name, entry in entries.items()}


def check_whole(file: Path) -> None:
    """Raises BadRequest unless the file ends where its last tensor does. The tensors may have any dtype."""
    header, size = _header(file, MOST_HEADER)
    fields = (found if isinstance(found, dict) else {} for name, found in header.items() if name != _METADATA)
    places = [_counts(found.get("data_offsets")) for found in fields]
    end = max((place[-1] for place in places if place), default=0)
    if not all(places) or end != size:
        raise _invalid(file, f"its tensors have {end} bytes, but {size} are there")


def read_fields(file: Path) -> tuple[dict[str, Any], int]:
    """The header's fields of each tensor, unchecked, and the byte of the file at which the tensors begin. Raises
    BadRequest when the header cannot be read."""
    header, size = _header(file, MOST_HEADER)
    header.pop(_METADATA, None)
    return header, file.stat().st_size - size


def _header(file: Path, most_header: int) -> tuple[dict[str, Any], int]:
    """The header, and the number of bytes behind it."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(_LENGTH_BYTES), "little")
        size = file.stat().st_size - _LENGTH_BYTES - length
        if length > most_header or size < 0:
            raise _invalid(file, f"the length of its header, {length} bytes, is greater than allowed or than the file")
        return _parsed(file, data.read(length)), size


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    """The header. The library that loads the file refuses some of what Python's parser takes: repeated names, NaN, -0,
    and halves of surrogate pairs."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_int=_natural)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise _invalid(file, "its header is not JSON") from None
    if not isinstance(found, dict):
        raise _invalid(file, "its header is not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


def _refuse(text: str) -> int:
    raise ValueError(f"{text} is not JSON")


def _natural(text: str) -> int:
    return _refuse(text) if text.startswith("-") else int(text)


def _entry(file: Path, name: str, found: Any) -> Entry:
    fields = found if isinstance(found, dict) else {}
    if unknown := sorted(fields.keys() - _FIELDS):
        raise _invalid(file, f"tensor {name[:200]!r} has the unknown field {unknown[0][:80]!r}")
    shape, place = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or place is None or len(place) != 2:
        raise _invalid(file, f"tensor {name[:200]!r} has no shape, or no data_offsets")
    dtype = str(fields.get("dtype"))
    if dtype not in ITEM_BYTES:
        raise BadRequest(f"{file.name}: {name[:200]} has the dtype {dtype[:20]}; use one of {', '.join(ITEM_BYTES)}")
    if place[1] - place[0] != prod(shape) * ITEM_BYTES[dtype]:
        raise _invalid(file, f"the data_offsets of {name[:200]} do not fit dtype {dtype} and shape {str(shape)[:100]}")
    return Entry(shape, *place)


def _counts(value: Any) -> tuple[int, ...] | None:
    """The whole numbers from 0 of a short list; None for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return None
    return tuple(value) if all(type(number) is int and 0 <= number < 2**63 for number in value) else None


def _check_filled(file: Path, entries: Mapping[str, Entry], size: int) -> None:
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            raise _invalid(file, f"there is a gap or an overlap at byte {end} of its data")
        end = entry.end
    if end != size:
        raise _invalid(file, f"its tensors have {end} bytes, but {size} are there")


def _invalid(file: Path, reason: str) -> BadRequest:
    return BadRequest(f"{file.name} is not a valid safetensors file: {reason}")

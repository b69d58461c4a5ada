"""The id of a base model's weights: a hash that copied and re-sharded files share.

It is made of the names, dtypes and shapes of all tensors, and of short samples of some of them. So of a model of any
size it reads the headers and 12 KB. It tells two trainings of one model apart, but not a change of a few numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.domain.records import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from app.services.imports.safetensors import read_fields
from workers.models.full_weights import cached
from workers.models.loading.source import local_path

_DIGITS = 16
_SAMPLED_TENSORS, _SAMPLE_BYTES = 64, 64


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: its bytes are [start, end)."""

    file: Path
    dtype: str
    shape: Sequence[int]
    start: int
    end: int


def weights_id(path: str) -> str:
    """The id of the weights in a folder, or of a hub id in this machine's cache; "" without safetensors files there.

    Raises OSError, ValueError or BadRequest when files are missing or damaged.
    """
    tensors = _tensors(_files(local_path(path)))
    if not tensors:
        return ""
    described = [[name, tensors[name].dtype, *tensors[name].shape] for name in sorted(tensors)]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in _sampled(tensors):
        digest.update(_sample(tensors[name]))
    return digest.hexdigest()[:_DIGITS]


def _files(source: str) -> list[Path]:
    """The files that transformers loads the weights from."""
    if whole := cached(source, [WEIGHTS_FILE]):
        return whole
    if not (index := cached(source, [WEIGHTS_INDEX_FILE])):
        return []
    names = sorted(set(json.loads(index[0].read_text())["weight_map"].values()))
    found = {name: cached(source, [name]) for name in names}
    if missing := [name for name in names if not found[name]]:
        raise FileNotFoundError(f"{missing[0]} is missing")
    return [file for files in found.values() for file in files]


def _tensors(files: Sequence[Path]) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for file in files:
        fields, begin = read_fields(file)
        end = begin + max((one["data_offsets"][1] for one in fields.values()), default=0)
        if (size := file.stat().st_size) != end:
            raise OSError(f"{file.name} has {size} bytes, and its tensors end at {end}; copy it again")
        for name, one in fields.items():
            start, end = one["data_offsets"]
            found[name] = _Stored(file, one["dtype"], one["shape"], begin + start, begin + end)
    return found


def _sampled(tensors: Mapping[str, _Stored]) -> list[str]:
    """The tensors that are sampled. Each n-th by name could be the same norm of each layer; the hashes are in no step
    with the layers."""
    return sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())[:_SAMPLED_TENSORS]


def _sample(tensor: _Stored) -> bytes:
    """Bytes from the start, the middle and the end of a tensor."""
    size = min(_SAMPLE_BYTES, tensor.end - tensor.start)
    last = tensor.end - size
    with tensor.file.open("rb", buffering=0) as file:
        places = (tensor.start, (tensor.start + last) // 2, last)
        return b"".join(os.pread(file.fileno(), size, place) for place in places)

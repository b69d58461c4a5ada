"""Only a safetensors file that is valid to its last byte is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from app.errors import BadRequest
from app.services.imports.safetensors import read_shapes

MOST = 2**17
TENSORS = {"a": np.zeros((2, 3), "float32"), "b": np.zeros(5, "float16"), "none": np.zeros((0, 4), "float32")}


def written(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(content)
    return file


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int = 0, end: int = 4, dtype: str = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_the_shapes_of_a_file_that_the_library_wrote_are_read(tmp_path: Path) -> None:
    found = read_shapes(written(tmp_path, save(TENSORS, {"format": "pt"})), MOST)
    assert found == {name: tensor.shape for name, tensor in TENSORS.items()}


_X = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
REFUSED_BY_THE_LIBRARY = {
    "a field twice": f'{{"x": {_X[:-1]}, "dtype": "F32"}}}}',
    "metadata twice": f'{{"__metadata__": {{}}, "__metadata__": {{}}, "x": {_X}}}',
    "NaN": f'{{"x": {_X[:-1]}, "other": NaN}}}}',
    "half a surrogate pair": f'{{"\\ud800": {_X}}}',
    "the same in metadata": f'{{"__metadata__": {{"a": "\\ud800"}}, "x": {_X}}}',
    "a huge number": f'{{"x": {_X[:-1]}, "other": {"9" * 400}}}}}',
    "deep": f'{{"x": {_X[:-1]}, "other": {"[" * 200}1{"]" * 200}}}}}',
    "minus 0": '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-0, 4]}}',
}


@pytest.mark.parametrize("case", REFUSED_BY_THE_LIBRARY)
def test_a_header_that_the_library_does_not_read_is_refused(case: str, tmp_path: Path) -> None:
    file = written(tmp_path, file_of(REFUSED_BY_THE_LIBRARY[case].encode(), bytes(4)))
    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(BadRequest, match="not a valid safetensors file"):
        read_shapes(file, MOST)


BAD = {
    "empty": b"",
    "cut in its length": b"\1\0\0",
    "no header": file_of(b""),
    "longer than the file": file_of(b"{}", length=3),
    "a huge header": file_of(b"{}" + b" " * MOST, b""),
    "a length of 2^63": file_of(b"{}", length=2**63),
    "no JSON": file_of(b"{]"),
    "a list": file_of([]),
    "UTF-16": file_of(json.dumps({"a": entry()}).encode("utf-16"), bytes(4)),
    "metadata that is a number": file_of({"__metadata__": 5, "a": entry()}, bytes(4)),
    "metadata with a number": file_of({"__metadata__": {"a": 5}, "a": entry()}, bytes(4)),
    "deep": file_of(b"[" * 100_000),
    "no entry": file_of({"a": None}),
    "a negative place": file_of({"a": entry(-4, 0)}, bytes(4)),
    "a huge shape": file_of({"a": entry(shape=[2**63])}, bytes(4)),
    "many dimensions": file_of({"a": entry(shape=[1] * 9)}, bytes(4)),
    "a true dimension": file_of({"a": entry(shape=[True])}, bytes(4)),
    "a place of another size": file_of({"a": entry(0, 8)}, bytes(8)),
    "three places": file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "an integer": file_of({"a": entry(dtype="I32")}, bytes(4)),
    "a dtype that is a list": file_of({"a": {**entry(), "dtype": ["F32"]}}, bytes(4)),
    "a gap": file_of({"a": entry(), "b": entry(8, 12)}, bytes(12)),
    "an overlap": file_of({"a": entry(), "b": entry()}, bytes(4)),
    "bytes after the last": file_of({"a": entry()}, bytes(5)),
    "cut at its end": save(TENSORS)[:-1],
}


@pytest.mark.parametrize("case", BAD)
def test_any_other_file_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(BadRequest, match=r"adapter_model\.safetensors"):
        read_shapes(written(tmp_path, BAD[case]), MOST)

"""Converts Tensor messages to numpy arrays: a dense buffer becomes a view; sparse rows are filled with zeros, or kept
sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from app.domain.sampling import Cells
from app.errors import BadRequest
from app.wire import tinker_pb2 as pb

MAX_SPARSE_ELEMENTS = 2**23
"""Most elements of all sparse tensors of a call when dense: 64 MiB of int64, the most that a body may bring by default.
A few bytes of CSR can name any shape."""
MAX_RANK = 8
"""Most dimensions of a tensor; the losses use at most two. The product of very many sizes would take very long."""
_MAX_ELEMENTS = 2**48
"""Upper bound of the product of a shape's sizes, with 1 for each 0. No tensor has so many elements, but a shape with a
0 can name such sizes, and numpy rejects sizes whose product does not fit its integers."""
_BFLOAT16 = np.dtype("<u2")
_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: _BFLOAT16,
}


def buffer(data: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    """A view [n] of raw little-endian numbers. Raises BadRequest when the length is not a multiple of the item size."""
    if len(data) % dtype.itemsize:
        raise BadRequest(
            f"{what}: {len(data)} bytes do not hold a whole number of {dtype.name} values of {dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype=dtype)


def check_dense_size(names: Sequence[str], inputs: Sequence[Mapping[str, pb.Tensor]]) -> None:
    """Raises BadRequest when the sparse tensors of a call would be too large as dense tensors."""
    given = ((name, datum[name]) for datum in inputs for name in names if name in datum)
    sparse = ((name, tensor) for name, tensor in given if tensor.WhichOneof("encoding") == "sparse_csr")
    total = sum(prod(max(0, size) for size in _shape(tensor, name)) for name, tensor in sparse)
    if total > MAX_SPARSE_ELEMENTS:
        raise BadRequest(
            f"the sparse tensors of the call have {total} elements as dense tensors; at most {MAX_SPARSE_ELEMENTS} are "
            "allowed: send fewer datums in one call"
        )


def to_array(tensor: pb.Tensor, what: str) -> np.ndarray:
    """float32, int64 or int32 of the tensor's shape; bfloat16 is widened. `what` names it in BadRequest's message."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise BadRequest(f"{what}: dtype {tensor.dtype} is unknown; use FLOAT32, INT64, INT32 or BFLOAT16")
    shape = _shape(tensor, what)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _densify(tensor.sparse_csr, dtype, shape, what)
    return _shaped(_widen(buffer(tensor.dense, dtype, what)), shape, what)


def to_cells(tensor: pb.Tensor, what: str) -> Cells:
    """A matrix of int64 in the layout it was sent in. Raises BadRequest for anything else; `what` names it there."""
    shape = _shape(tensor, what)
    if tensor.dtype != pb.DTYPE_INT64 or len(shape) != 2:
        raise BadRequest(f"{what}: expected an int64 tensor with two dimensions (got shape {list(shape)})")
    rows, width = shape
    if width < 1:  # a row without values costs its sender nothing, so a body may claim two billion rows
        raise BadRequest(f"{what}: shape {list(shape)} has no columns")
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = _shaped(buffer(tensor.dense, _DTYPES[pb.DTYPE_INT64], what), shape, what)
        return Cells(values.reshape(-1), np.arange(rows + 1, dtype=np.int64) * width, width)
    values, starts, columns = _csr(tensor.sparse_csr, _DTYPES[pb.DTYPE_INT64], what)
    _check_csr(values, starts, columns, shape, what)
    return Cells(values, starts, width, columns)


def _shape(tensor: pb.Tensor, what: str) -> tuple[int, ...]:
    if len(tensor.shape) > MAX_RANK:
        raise BadRequest(f"{what}: the shape has {len(tensor.shape)} dimensions; at most {MAX_RANK} are allowed")
    shape = tuple(tensor.shape)
    if prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
        raise BadRequest(f"{what}: shape {list(shape)} is too large for a tensor")
    return shape


def _widen(values: np.ndarray) -> np.ndarray:
    if values.dtype != _BFLOAT16:
        return values
    return (values.astype("<u4") << 16).view("<f4")


def _shaped(values: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    if not shape or shape == values.shape:
        return values
    if min(shape) < 0 or prod(shape) != values.size:
        raise BadRequest(f"{what}: shape {list(shape)} does not fit its {values.size} values")
    return values.reshape(shape)


def _densify(csr: pb.SparseCsr, dtype: np.dtype, shape: Sequence[int], what: str) -> np.ndarray:
    if len(shape) != 2 or min(shape) < 0:
        raise BadRequest(f"{what}: a sparse tensor needs a shape of two dimensions (got {list(shape)})")
    values, starts, columns = _csr(csr, dtype, what)
    _check_csr(values, starts, columns, shape, what)
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense


def _csr(csr: pb.SparseCsr, dtype: np.dtype, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the values, the start of each row in them, the column of each value)."""
    indices = _DTYPES[pb.DTYPE_INT64]
    return (
        _widen(buffer(csr.values, dtype, what)),
        buffer(csr.crow_indices, indices, what),
        buffer(csr.col_indices, indices, what),
    )


def _check_csr(values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: Sequence[int], what: str) -> None:
    rows, width = shape
    falls = (starts[1:] < starts[:-1]).any()  # the differences of any int64 may wrap around
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != len(values) or falls:
        raise BadRequest(f"{what}: crow_indices must be {rows + 1} numbers that rise from 0 to {len(values)}")
    if len(columns) != len(values) or ((columns < 0) | (columns >= width)).any():
        raise BadRequest(f"{what}: col_indices must be {len(values)} numbers in 0..{width - 1}")

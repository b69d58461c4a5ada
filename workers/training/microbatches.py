"""Cutting the datums of a pass into padded micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import numpy as np

from app.domain.batch import Ragged


@dataclass(frozen=True, slots=True)
class Share:
    """The datums of one Op, by index, that are in a micro-batch."""

    op: int
    datums: np.ndarray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward: share after share, each padded on the right to `length` tokens."""

    shares: tuple[Share, ...]
    length: int


def cut(lengths: Sequence[Sequence[int]], limit: int) -> list[MicroBatch]:
    """Every datum once, longest first, at most `limit` padded tokens a micro-batch (a longer datum goes alone).

    `lengths` holds the datums' token counts, Op by Op. With one Op the cut depends on its own lengths alone, and
    sorting leaves little padding.
    """
    rows = sorted((-n, op, datum) for op, ns in enumerate(lengths) for datum, n in enumerate(ns))
    batches: list[MicroBatch] = []
    start = 0
    while start < len(rows):
        longest = max(1, -rows[start][0])
        stop = start + max(1, limit // longest)
        batches.append(MicroBatch(tuple(_shares((op, datum) for _, op, datum in rows[start:stop])), longest))
        start = stop
    return batches


def _shares(rows: Iterator[tuple[int, int]]) -> Iterator[Share]:
    for op, group in groupby(sorted(rows), key=lambda row: row[0]):
        yield Share(op, np.array([datum for _, datum in group]))


class Column:
    """One input of all datums of an Op, from which padded blocks are read. Arrays are [n] or [n, k]."""

    def __init__(self, ragged: Ragged) -> None:
        self._ragged = ragged
        self._starts = np.array(ragged.offsets())
        self._sizes = np.array([prod(shape) for shape in ragged.shapes], dtype=np.int64)
        self._widths = np.array([shape[1] if len(shape) > 1 else 1 for shape in ragged.shapes], dtype=np.int64)

    @cached_property
    def lengths(self) -> list[int]:
        return [shape[0] for shape in self._ragged.shapes]

    def positions(self, datums: np.ndarray, length: int) -> np.ndarray:
        """int64 [datums, length, widest k]: where in the ragged values each element lies, -1 for padding."""
        widths = self._widths[datums, None, None]
        row, lane = np.arange(length)[None, :, None], np.arange(int(widths.max()))[None, None, :]
        within = row * widths + lane
        real = (lane < widths) & (within < self._sizes[datums, None, None])
        return np.where(real, self._starts[datums, None, None] + within, -1)

    def block(self, datums: np.ndarray, length: int) -> np.ndarray:
        """[datums, length, widest k] with 0 for padding, in the column's dtype."""
        where = self.positions(datums, length)
        values = self._ragged.values
        return np.where(where >= 0, values[where], values.dtype.type(0)) if len(values) else np.zeros_like(where)

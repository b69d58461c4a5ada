"""Cuts the datums of a pass into micro-batches, and these into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import numpy as np

from app.domain.batch import Ragged

_Row = tuple[int, int, int]
"""(Op, datum, number of tokens in the datum)."""


@dataclass(frozen=True, slots=True)
class Share:
    """The datums of one Op, by index, in one micro-batch; `lengths` are their token counts."""

    op: int
    datums: np.ndarray
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole datums, share after share, with their tokens end to end."""

    shares: tuple[Share, ...]

    @property
    def lengths(self) -> list[int]:
        return [length for share in self.shares for length in share.lengths]

    def blocks(self, limit: int) -> Iterator[tuple[slice, MicroBatch]]:
        """Yields consecutive datums of at most `limit` tokens (a longer datum goes alone), with their tokens' slice."""
        rows = [
            (share.op, int(datum), length)
            for share in self.shares
            for datum, length in zip(share.datums, share.lengths, strict=True)
        ]
        end = 0
        for block in _grouped(rows, limit, packed=True):
            start, end = end, end + sum(length for _, _, length in block)
            yield slice(start, end), _micro_batch(block)


def cut(lengths: Sequence[Sequence[int]], limit: int, *, packed: bool) -> list[MicroBatch]:
    """Takes every datum once, longest first, at most `limit` tokens a micro-batch (a longer datum goes alone).

    `lengths` holds the datums' token counts, Op by Op. Unless `packed`, a datum counts as the longest beside it. With
    one Op the cut depends on its own lengths alone, and neighbours are of similar length.
    """
    rows = [(op, datum, n) for op, ns in enumerate(lengths) for datum, n in enumerate(ns)]
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    return [_micro_batch(group) for group in _grouped(rows, limit, packed=packed)]


def _grouped(rows: Sequence[_Row], limit: int, *, packed: bool) -> Iterator[list[_Row]]:
    group: list[_Row] = []
    tokens = longest = 0
    for row in rows:
        longest = max(longest, row[2])
        cost = tokens + row[2] if packed else (len(group) + 1) * longest
        if group and cost > limit:
            yield group
            group, tokens, longest = [], 0, row[2]
        group.append(row)
        tokens += row[2]
    if group:
        yield group


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    """Groups the rows by Op; within one Op, the order of `rows` is kept."""
    shares = []
    for op, group in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0]):
        _, datums, lengths = zip(*group, strict=True)
        shares.append(Share(op, np.array(datums), lengths))
    return MicroBatch(tuple(shares))


class Column:
    """One input of all datums of an Op, read as padded blocks. Arrays are [n] or [n, k]."""

    def __init__(self, ragged: Ragged) -> None:
        self._ragged = ragged
        self._starts = np.array(ragged.offsets())
        self._sizes = np.array([prod(shape) for shape in ragged.shapes], dtype=np.int64)
        self._widths = np.array([shape[1] if len(shape) > 1 else 1 for shape in ragged.shapes], dtype=np.int64)

    @cached_property
    def lengths(self) -> list[int]:
        return [shape[0] for shape in self._ragged.shapes]

    def width(self, datums: np.ndarray) -> int:
        """Returns the widest k of these datums, 1 for arrays [n]."""
        return int(self._widths[datums].max())

    def flat(self, datums: np.ndarray) -> np.ndarray:
        """Returns the arrays of these datums, each [n], end to end."""
        return np.concatenate([self._ragged.values[self._starts[i] : self._starts[i + 1]] for i in datums])

    def positions(self, datums: np.ndarray, length: int) -> np.ndarray:
        """Returns int64 [datums, length, widest k]: the index of each element in the ragged values, -1 for padding."""
        widths = self._widths[datums, None, None]
        row, lane = np.arange(length)[None, :, None], np.arange(self.width(datums))[None, None, :]
        within = row * widths + lane
        real = (lane < widths) & (within < self._sizes[datums, None, None])
        return np.where(real, self._starts[datums, None, None] + within, -1)

    def block(self, datums: np.ndarray, length: int) -> np.ndarray:
        """Returns [datums, length, widest k] with 0 for padding, in the column's dtype."""
        where = self.positions(datums, length)
        values = self._ragged.values
        return np.where(where >= 0, values[where], values.dtype.type(0)) if len(values) else np.zeros_like(where)

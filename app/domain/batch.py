"""The data of a forward_backward: one array for each datum, stored as a few long arrays.

Columns instead of a list of datums: checking, hashing and storing a 5 MB body takes only a handful of numpy calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Ragged:
    """n arrays of one dtype and any shapes. `values` holds them end to end; `shapes` holds their shapes."""

    values: np.ndarray
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], dtype: type[np.generic] | np.dtype) -> Ragged:
        flat = [np.asarray(a, dtype=dtype).ravel() for a in arrays]
        values = np.concatenate(flat) if flat else np.empty(0, dtype=dtype)
        return cls(values, tuple(tuple(a.shape) for a in arrays))

    def __len__(self) -> int:
        return len(self.shapes)

    def offsets(self) -> list[int]:
        """n+1 element offsets into `values`, the first 0."""
        return [0, *accumulate(prod(s) for s in self.shapes)]

    def __iter__(self) -> Iterator[np.ndarray]:
        cuts = self.offsets()
        for start, stop, shape in zip(cuts, cuts[1:], self.shapes, strict=False):
            yield self.values[start:stop].reshape(shape)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of datums: `tokens` int32 [N_i]; `inputs` by name, each [N_i] or [N_i, K_i] (int64 target_tokens, else
    float32)."""

    tokens: Ragged
    inputs: Mapping[str, Ragged]

    def __len__(self) -> int:
        return len(self.tokens)

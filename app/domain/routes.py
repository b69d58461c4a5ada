"""The routes of tokens: the experts that the routers of a model with experts chose for them. Router replay makes a
trainer take the sampler's routes.

Routes are arrays [tokens, layers with experts, top_k]. Where a token has no route, they hold `none_of`, a number that
no expert has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.domain import ops

_SMALL = 256


def dtype_of(experts: int) -> np.dtype:
    """The dtype of the routes of a model with this many experts: uint8 below 256 experts, else int16."""
    return np.dtype("<u1" if experts < _SMALL else "<i2")


def none_of(dtype: np.dtype) -> int:
    """The number in the place of an expert where a token has no route."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class Span:
    """`length` consecutive tokens of a datum: those from `offset` on of a sampled sequence, or of its prompt."""

    sequence_id: str
    sampled: bool
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SequenceRoutes:
    """The tokens of a prompt and of one sample, int32 [n], and their routes.

    The last sampled token never went through the model, so `sample_routes` has one row less than `sample`.
    """

    prompt: np.ndarray
    prompt_routes: np.ndarray
    sample: np.ndarray
    sample_routes: np.ndarray

    def encode(self) -> bytes:
        return ops.encode([self.prompt, self.prompt_routes, self.sample, self.sample_routes])

    @classmethod
    def decode(cls, data: bytes) -> SequenceRoutes:
        return cls(*ops.decode(data))

    def part(self, span: Span) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a span, and their routes: one row less where the span has the last sampled token."""
        rows = slice(span.offset, span.offset + span.length)
        tokens, routes = (self.sample, self.sample_routes) if span.sampled else (self.prompt, self.prompt_routes)
        return tokens[rows], routes[rows]

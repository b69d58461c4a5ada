"""One batch of random tokens, as a training backend takes it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from app.domain.ops import AdamParams, Batch, ForwardBackward, Ragged

LOSS = "cross_entropy"
ADAM = AdamParams(learning_rate=1e-4, eps=1e-8)


def random_tokens(rows: int, length: int, vocab_size: int) -> np.ndarray:
    """Returns int32 [rows, length], the same on every call."""
    return np.random.default_rng(0).integers(0, vocab_size, size=(rows, length), dtype=np.int32)


def targets(tokens: np.ndarray) -> np.ndarray:
    """Returns int64 [rows, length]: the next token. The last token's target has weight 0 (see `weights`)."""
    return np.roll(tokens, -1, axis=1).astype(np.int64)


def weights(tokens: np.ndarray) -> np.ndarray:
    """Returns float32 [rows, length]: 1, and 0 for the last token, whose successor is unknown."""
    found = np.ones(tokens.shape, dtype=np.float32)
    found[:, -1] = 0
    return found


def rates(tokens: int, samples_ms: Sequence[float]) -> dict[str, float]:
    """Tokens per second in the best and in the median pass over `tokens`."""
    found = [tokens / ms * 1000 for ms in samples_ms]
    return {"best": max(found), "median": median(found)}


def operation(tokens: np.ndarray) -> ForwardBackward:
    """Operation for a training backend."""
    inputs = {
        "target_tokens": Ragged.of(list(targets(tokens)), np.int64),
        "weights": Ragged.of(list(weights(tokens)), np.float32),
    }
    return ForwardBackward(Batch(Ragged.of(list(tokens), np.int32), inputs), LOSS)

"""Random datums as plain numpy arrays, and as the Batch that a backend takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.domain.ops import Batch, Ragged

Datum = dict[str, np.ndarray]
"""`tokens` int32 [N], and the loss's inputs by name, each [N] or [N, K]."""

_DTYPES = {"target_tokens": np.int64}


def supervised(seed: int, lengths: Sequence[int], width: int = 0, vocab: int = 320) -> list[Datum]:
    """Datums for cross_entropy, with real weights of either sign. `width` K > 0 makes the targets [N, K]."""
    rng = np.random.default_rng(seed)
    shapes = [(n, width) if width else (n,) for n in lengths]
    return [
        {
            "tokens": rng.integers(0, vocab, shape[0], dtype=np.int32),
            "target_tokens": rng.integers(0, vocab, shape),
            "weights": rng.normal(0.5, 1.0, shape).astype(np.float32),
        }
        for shape in shapes
    ]


def policy(seed: int, lengths: Sequence[int], vocab: int = 320) -> list[Datum]:
    """Datums for the policy losses: ratios on both sides of the clip thresholds; the first two tokens are a prompt."""
    rng = np.random.default_rng(seed)
    datums = []
    for n in lengths:
        advantages = rng.normal(0.0, 1.0, n).astype(np.float32)
        advantages[:2] = 0.0
        datums.append(
            {
                "tokens": rng.integers(0, vocab, n, dtype=np.int32),
                "target_tokens": rng.integers(0, vocab, n),
                "logprobs": rng.normal(-6.0, 0.5, n).astype(np.float32),
                "advantages": advantages,
            }
        )
    return datums


def sequences(seed: int, lengths: Sequence[int], vocab: int = 320) -> list[Datum]:
    """Datums for gspo: as `policy`, with a mask of odd values on some sampled tokens, always the last too."""
    rng = np.random.default_rng((seed, 1))
    datums = policy(seed, lengths, vocab)
    for datum, n in zip(datums, lengths, strict=True):
        mask = rng.choice([0.0, 1.0, 0.5, -1.0], n).astype(np.float32)
        mask[:2], mask[-1] = 0.0, 1.0
        datum["sequence_ratio_mask"] = mask
    return datums


def valued(seed: int, lengths: Sequence[int], vocab: int = 320) -> list[Datum]:
    """Datums for ppo_critic: new values within and beyond the clip range of the old values.

    The first two tokens are a prompt, if more tokens follow.
    """
    rng = np.random.default_rng((seed, 3))
    datums = []
    for n in lengths:
        weights = rng.choice([1.0, 1.0, 0.5], n).astype(np.float32)
        weights[: min(2, n - 1)] = 0.0
        datums.append(
            {
                "tokens": rng.integers(0, vocab, n, dtype=np.int32),
                "values": rng.normal(0.0, 0.4, n).astype(np.float32),
                "returns": rng.normal(0.3, 1.0, n).astype(np.float32),
                "weights": weights,
            }
        )
    return datums


def thresholds(seed: int, datums: Sequence[Datum]) -> list[Datum]:
    """The same datums with a clip range for every token, on either side of most ratios."""
    rng = np.random.default_rng((seed, 2))
    return [
        {
            **datum,
            "clip_low_threshold": rng.uniform(0.3, 0.9, len(datum["tokens"])).astype(np.float32),
            "clip_high_threshold": rng.uniform(0.9, 1.6, len(datum["tokens"])).astype(np.float32),
        }
        for datum in datums
    ]


def data(loss_fn: str, seed: int, lengths: Sequence[int]) -> list[Datum]:
    """Datums that `loss_fn` takes."""
    makers = {"cross_entropy": supervised, "gspo": sequences, "ppo_critic": valued}
    return makers.get(loss_fn, policy)(seed, lengths)


def batch(datums: Sequence[Datum]) -> Batch:
    names = [name for name in datums[0] if name != "tokens"] if datums else ["target_tokens"]
    return Batch(
        Ragged.of([datum["tokens"] for datum in datums], np.int32),
        {name: Ragged.of([datum[name] for datum in datums], _DTYPES.get(name, np.float32)) for name in names},
    )

"""Datums of 32 to 512 tokens through a trainer: as they are, and padded as a collator would pad them.

Padded means: in the order given, four rows a micro-batch, each filled up to the longest of the four with tokens that
weigh nothing; the trainer cannot know, so both sides run the same code. Only real tokens count.

`python -m ops.bench.ragged BASE_MODEL_JSON` is the side that measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from app.domain.batch import Batch, Ragged
from app.domain.ops import ForwardBackward
from app.settings import BaseModelSettings
from ops.bench import batches, models, side, timing
from ops.bench.bare_trainer import BareTrainer
from ops.bench.report import Goal, Outcome

_ROWS = 32
_LENGTHS = (32, 512)
_MICRO_BATCH_ROWS = 4
_RANK = 16
_GOAL = 1.5
_ROUNDS = 5
Samples = dict[str, list[float]]


def run(folder: Path) -> Outcome:
    base = models.bundled().model_dump_json()
    found: Samples = side.measured("ops.bench.ragged", base, folder / "side.log", _ROUNDS)
    packed, padded = found["packed"], found["padded"]
    real = sum(_lengths())
    ratio = min(padded) / min(packed)
    figures = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "datums": _ROWS,
        "tokens": real,
        "padded_tokens": sum(_padded_lengths()),
        "packed_tokens_per_s": batches.rates(real, packed),
        "padded_tokens_per_s": batches.rates(real, padded),
        "packed_over_padded": {
            "best": ratio,
            "median_round": median(b / a for a, b in zip(packed, padded, strict=True)),
        },
    }
    return Outcome(figures, (Goal("ragged: packed over padded tokens/s", ratio, "at_least", _GOAL, ""),))


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of each forward_backward, in turns."""
    settings = BaseModelSettings.model_validate_json(sys.argv[1])
    trainer = BareTrainer(settings, models=1, rank=_RANK)
    real = _lengths()
    packed = _operation(real, real)
    padded = [
        _operation(real[i : i + _MICRO_BATCH_ROWS], _padded_lengths()[i : i + _MICRO_BATCH_ROWS])
        for i in range(0, _ROWS, _MICRO_BATCH_ROWS)
    ]

    def train(ops: Sequence[ForwardBackward]) -> float:
        return trainer.timed_ms(*({"m0": op} for op in ops))

    return partial(timing.alternate, sides={"packed": lambda: train([packed]), "padded": lambda: train(padded)})


def _lengths() -> list[int]:
    low, high = _LENGTHS
    return [int(n) for n in np.random.default_rng(0).integers(low, high, _ROWS, endpoint=True)]


def _padded_lengths() -> list[int]:
    """Of every datum, when it is as long as the longest of its four."""
    real = _lengths()
    return [max(real[i - i % _MICRO_BATCH_ROWS :][:_MICRO_BATCH_ROWS]) for i in range(len(real))]


def _operation(real: Sequence[int], lengths: Sequence[int]) -> ForwardBackward:
    """Datums of `lengths`, of which the first real[i] tokens count."""
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 1000, n, dtype=np.int32) for n in lengths]
    weights = [(np.arange(n) < counted).astype(np.float32) for n, counted in zip(lengths, real, strict=True)]
    inputs = {
        "target_tokens": Ragged.of([np.roll(row, -1) for row in tokens], np.int64),
        "weights": Ragged.of(weights, np.float32),
    }
    return ForwardBackward(Batch(Ragged.of(tokens, np.int32), inputs), batches.LOSS)


if __name__ == "__main__":
    side.serve(prepare)

"""Datums of 32 to 512 tokens through a trainer: unpadded, and padded.

Padded rows are in the given order, four rows a micro-batch. Each row is filled up with tokens of weight 0, to the
longest of the four; a second variant pads to the longest of the batch. The trainer cannot tell padding from real
tokens, so all sides run the same code, and even padding costs its head no backward. Only real tokens count.

`python -m ops.bench.ragged BASE_MODEL_JSON` is the side that measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from app.domain.ops import Batch, ForwardBackward, Ragged
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
_PADDED_TO = {"padded to the batch": _ROWS, "padded to the micro-batch": _MICRO_BATCH_ROWS}
Samples = dict[str, list[float]]


def run(folder: Path) -> Outcome:
    base = models.bundled().model_dump_json()
    found: Samples = side.measured("ops.bench.ragged", base, folder / "side.log", _ROUNDS)
    real = sum(_lengths())
    ratios = {name: _ratios(found["packed"], found[name]) for name in _PADDED_TO}
    figures = {
        "rounds": _ROUNDS,
        "threads": side.CORES,
        "datums": _ROWS,
        "tokens": real,
        "padded_tokens": {name: sum(_padded_lengths(rows)) for name, rows in _PADDED_TO.items()},
        "tokens_per_s": {name: batches.rates(real, samples) for name, samples in found.items()},
        "packed_over": ratios,
    }
    ratio = ratios["padded to the micro-batch"]["best"]
    return Outcome(figures, (Goal("ragged: packed over padded tokens/s", ratio, "at_least", _GOAL, ""),))


def _ratios(packed: Sequence[float], padded: Sequence[float]) -> dict[str, float]:
    return {
        "best": min(padded) / min(packed),
        "median_round": median(b / a for a, b in zip(packed, padded, strict=True)),
    }


def prepare() -> Callable[[int], Samples]:
    """Returns measure(count): ms of each forward_backward, in turns."""
    settings = BaseModelSettings.model_validate_json(sys.argv[1])
    trainer = BareTrainer(settings, models=1, rank=_RANK)
    real = _lengths()
    whole = [_operation(real, real)]

    def train(ops: Sequence[ForwardBackward]) -> float:
        return trainer.timed_ms(*({"m0": op} for op in ops))

    padded = {name: partial(train, _micro_batches(real, _padded_lengths(rows))) for name, rows in _PADDED_TO.items()}
    return partial(timing.alternate, sides={"packed": partial(train, whole), **padded})


def _micro_batches(real: Sequence[int], lengths: Sequence[int]) -> list[ForwardBackward]:
    cuts = [slice(i, i + _MICRO_BATCH_ROWS) for i in range(0, _ROWS, _MICRO_BATCH_ROWS)]
    return [_operation(real[cut], lengths[cut]) for cut in cuts]


def _lengths() -> list[int]:
    low, high = _LENGTHS
    return [int(n) for n in np.random.default_rng(0).integers(low, high, _ROWS, endpoint=True)]


def _padded_lengths(rows: int) -> list[int]:
    """Length of every datum, when it is padded to the longest of its `rows`."""
    real = _lengths()
    return [max(real[i - i % rows :][:rows]) for i in range(len(real))]


def _operation(real: Sequence[int], lengths: Sequence[int]) -> ForwardBackward:
    """Datums of `lengths`; only the first real[i] tokens of datum i count."""
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

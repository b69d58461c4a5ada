"""Compares the bfloat16 error of a pass with that of transformers' own model in bfloat16.

The reference runs in the same test on the same machine, because processors round bfloat16 in different places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.parity.datums import Datum
from tests.parity.reference import Reference

# Enough tokens that random rounding errors average out.
MANY_LENGTHS = (23, 7, 40, 2, 31, 60, 60, 64, 50, 33)
# Two computations that round equally often are equally far from fp32. Rounding twice as often is worth a factor of
# sqrt(2) = 1.41; the bound is half way there.
_MOST = 1.2
# fp32 alone: the bound of test_training.py.
_FP32 = 1e-5


@dataclass(frozen=True, slots=True)
class Found:
    """Outputs of a forward_backward in bfloat16: the scores of each datum, the summed loss, and the gradients."""

    scores: Sequence[np.ndarray]
    loss: float
    gradients: Mapping[str, np.ndarray]


def check_rounding(found: Found, exact: Reference, rounded: Reference, datums: Sequence[Datum], loss_fn: str) -> None:
    """Checks the rounding of `found`. `exact` and `rounded` are the same model in fp32 and in bfloat16.

    Scores are fp32, and as near to `exact` as those of `rounded`. The loss is that of the scores found, computed in
    fp32. Gradients are as near to `exact` as those of `rounded`, each at its own scores: a score beside a clip
    threshold may be on either side of it, and then the loss's slope says nothing about the gradients' rounding.
    """
    assert all((one.view(np.uint32) & 0xFFFF).any() for one in found.scores), "bits that bfloat16 does not have"
    theirs = rounded.forward(datums)
    wanted = exact.forward(datums)
    assert _distance(found.scores, wanted) < _MOST * _distance(theirs, wanted)
    loss = exact.backward(datums, loss_fn, at=found.scores)
    assert abs(found.loss - loss) < _FP32 * exact.size(datums, loss_fn)
    ours = _distance_of_all(found.gradients, exact.take_gradients())
    rounded.backward(datums, loss_fn, at=theirs)
    exact.backward(datums, loss_fn, at=theirs)
    assert ours < _MOST * _distance_of_all(rounded.take_gradients(), exact.take_gradients())


def _distance_of_all(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    assert found.keys() == wanted.keys()
    return _distance([found[name] for name in wanted], [*wanted.values()])


def _distance(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """|found - wanted| / |wanted| over all of them together."""
    off = np.concatenate([(one - other).ravel() for one, other in zip(found, wanted, strict=True)])
    return float(np.linalg.norm(off) / np.linalg.norm(np.concatenate([one.ravel() for one in wanted])))

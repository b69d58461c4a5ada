"""No optim_step runs on part of its gradients."""

from __future__ import annotations

import pytest

from app.domain.ops import FORWARD, FORWARD_BACKWARD
from app.stores.redis.types import Entry
from workers.train.executor import GradAccumulation

GOOD, STEP, LOAD, EVAL = (FORWARD_BACKWARD, ""), ("optim_step", ""), ("load_weights", ""), (FORWARD, "")
FAILED, REFUSED, GAP = (FORWARD_BACKWARD, "infinite"), ("lost_batch", ""), ("drop_gradients", "")


def accumulation(*history: tuple[str, str]) -> GradAccumulation:
    found = GradAccumulation()
    for kind, failure in history:
        found = found.after(
            Entry(1, kind, "r", b"", "lost" if kind in ("lost_batch", "drop_gradients") else "", 1), failure
        )
    return found


@pytest.mark.parametrize(
    ("history", "may_step"),
    [
        ([GOOD], True),
        ([FAILED], False),
        ([REFUSED], False),
        ([GAP], False),
        ([FAILED, EVAL], False),
        ([FAILED, GOOD], False),  # sent again, or sent before the failure was known?
        ([REFUSED, GOOD], True),  # sent again
        ([REFUSED, REFUSED, GOOD], True),
        ([GOOD, FAILED, GOOD], False),  # if the last is the whole batch again, the first counts twice
        ([GOOD, REFUSED, GOOD, GOOD], False),
        ([GOOD, GAP, GOOD], True),  # the gap dropped the gradients before it
        ([GOOD, FAILED, STEP, GOOD], True),  # the failed step ended the window
        ([FAILED, STEP, GOOD], True),
        ([GOOD, FAILED, LOAD, GOOD], True),
        ([GOOD, FAILED, ("load_weights", "no such checkpoint"), GOOD], False),
    ],
)
def test_a_step_runs_only_on_whole_gradients(history, may_step):
    assert (not accumulation(*history).missing) == may_step

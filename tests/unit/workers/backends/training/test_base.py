"""Calls reach the other ranks of a trainer as bytes, unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, LoraSpec, OptimStep
from tests.parity.datums import batch, supervised
from workers.backends.training.base import BackendOp, Create, Load, decode, encode_apply, encode_call


@pytest.mark.parametrize(
    "op",
    [
        Create(LoraSpec(4, seed=3)),
        Create(LoraSpec(4), Path("/some/folder"), optimizer=True),
        Load(Path("/some/folder"), optimizer=False),
        OptimStep(AdamParams(1e-3)),
        DropGradients(),
    ],
)
def test_an_op_reaches_the_other_ranks_unchanged(op: BackendOp) -> None:
    assert decode(encode_apply({"m": op})) == ("apply", {"m": op})


def test_a_batch_and_the_order_of_models_reach_the_other_ranks() -> None:
    op = ForwardBackward(batch(supervised(0, (3, 5))), "ppo", {"beta": 0.1}, forward_only=True)
    method, ops = decode(encode_apply({"z": op, "a": DropGradients()}))
    assert (method, list(ops)) == ("apply", ["z", "a"])
    assert (ops["z"].loss_fn, ops["z"].loss_config, ops["z"].forward_only) == ("ppo", {"beta": 0.1}, True)
    np.testing.assert_array_equal(ops["z"].batch.tokens.values, op.batch.tokens.values)


def test_other_calls_carry_their_arguments() -> None:
    assert decode(encode_call("save", "m", "/folder", True)) == ("save", "m", "/folder", True)

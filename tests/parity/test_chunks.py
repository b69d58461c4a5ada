"""A request in chunks, merged by the SDK's own code, against the same request in one piece."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP, combine_fwd_bwd_output_results
from tinker.proto.response_conv import deserialize_forward_backward_output

from app.domain.ops import ForwardBackward
from app.wire.results import encode_forward_backward
from tests.parity.datums import Datum, batch, data, supervised
from tests.parity.reference import relative_error
from tests.parity.training import LENGTHS, LOSSES, run
from workers.backends.training.trainer import Trainer

# No token of the second chunk has an advantage; one datum of the third chunk is a single token.
CUTS = ((0, 2), (3, 4), (2, 3), (4, 6))
MIXED = [*supervised(4, (5, 12), width=2), *supervised(5, (2,)), *supervised(6, (9, 1, 3), width=3)]
CASES: dict[str, tuple[str, list[Datum]]] = {
    **{loss_fn: (loss_fn, data(loss_fn, 4, (*LENGTHS, 1))) for loss_fn in LOSSES},
    "targets of several widths": ("cross_entropy", MIXED),
}


@pytest.mark.parametrize("case", CASES)
def test_chunks_merged_by_the_sdk_equal_the_whole(trainer: Trainer, create: Callable[..., str], case: str) -> None:
    loss_fn, datums = CASES[case]
    ordered = [datum for start, stop in CUTS for datum in datums[start:stop]]
    whole, parts = create(), create()

    def output(model: str, some: list[Datum]):
        body = encode_forward_backward(run(trainer, model, ForwardBackward(batch(some), loss_fn, {"entropy": 1.0})))
        return deserialize_forward_backward_output(body)

    wanted = output(whole, ordered)
    found = combine_fwd_bwd_output_results([output(parts, datums[start:stop]) for start, stop in CUTS])
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-5)
    assert all(np.isfinite(value) for value in found.metrics.values())
    assert relative_error(trainer.gradients(parts), trainer.gradients(whole)) < 1e-5
    for one, same in zip(found.loss_fn_outputs, wanted.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), same["logprobs"].to_numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_metric_has_a_reduction_the_sdk_knows(trainer: Trainer, model: str, loss_fn: str) -> None:
    """The merge drops a key with another suffix, and fails on a key without exactly one colon."""
    metrics = run(trainer, model, ForwardBackward(batch(data(loss_fn, 4, LENGTHS)), loss_fn, {"entropy": 1.0})).metrics
    assert all(key.count(":") == 1 and key.split(":")[1] in REDUCE_MAP for key in metrics)
    assert metrics.keys() >= {"loss:sum", "tokens:sum", "loss_tokens:sum", "entropy:sum"}

"""Sparse targets and weights, as the SDK sends them, against the same tensors dense: one Op, the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from app.domain import ops
from app.domain.ops import ForwardBackward
from app.wire.forward_backward import no_losses, open_envelope
from tests.parity.datums import Datum
from tests.parity.reference import Reference, relative_error
from tests.parity.training import run
from workers.backends.training.trainer import Trainer


def distillation(seed: int, lengths: tuple[int, ...], width: int = 40) -> list[Datum]:
    """Sparse soft targets: each tensor drops its own zeros, and token 0 has a weight too."""
    rng = np.random.default_rng(seed)
    datums = []
    for n in lengths:
        kept = rng.random((n, width)) < 0.1
        targets = np.where(kept, rng.integers(0, 320, (n, width)), 0)
        weights = np.where(rng.random((n, width)) < 0.1, rng.normal(0.5, 1.0, (n, width)), 0.0).astype(np.float32)
        datums.append({"tokens": rng.integers(0, 320, n, dtype=np.int32), "target_tokens": targets, "weights": weights})
    return datums


def op_of(datums: list[Datum], encode: Callable[[np.ndarray], object]) -> tuple[ForwardBackward, int]:
    """The Op that the server makes of the SDK's body, and the body's size in bytes."""
    rows = [
        types.Datum(
            model_input=types.ModelInput.from_ints(datum["tokens"].tolist()),
            loss_fn_inputs={name: encode(datum[name]) for name in ("target_tokens", "weights")},
        )
        for datum in datums
    ]
    request = ForwardBackwardRequest(ForwardBackwardInput(rows, "cross_entropy", None), "s:train:0", 1)
    body = forward_backward_request_to_proto(request).SerializeToString()
    return open_envelope(body).decode(no_losses), len(body)


def test_sparse_rows_train_as_dense_ones_do(
    trainer: Trainer, model: str, create: Callable[..., str], reference: Reference
) -> None:
    datums = distillation(1, (17, 1, 30))
    sparse, small = op_of(datums, torch.from_numpy)
    dense, large = op_of(datums, types.TensorData.from_numpy)
    assert small < large / 3, "the SDK was expected to send CSR"
    assert ops.encode(sparse) == ops.encode(dense)
    other = create()
    outputs = [run(trainer, name, op) for name, op in ((model, sparse), (other, dense))]
    assert outputs[0].metrics == outputs[1].metrics
    assert outputs[0].metrics["loss:sum"] == pytest.approx(reference.backward(datums, "cross_entropy"), rel=1e-5)
    assert relative_error(trainer.gradients(model), reference.gradients()) < 1e-5

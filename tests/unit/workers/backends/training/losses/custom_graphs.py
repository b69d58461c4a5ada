"""Hand-made graphs of custom losses, and datums to run them on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.domain.losses import CustomLoss
from app.domain.ops import Batch, Ragged
from app.wire import custom_loss
from workers.backends.training.losses.custom import CustomLossRun

# Four tokens: logprobs below zero, weights in (0, 1), a matrix, and positions.
LOGPROBS = torch.tensor([-0.5, -2.0, -0.1, -1.5])
WEIGHTS = torch.tensor([0.25, 0.5, 0.75, 0.125])
MATRIX = torch.tensor([[0.5, -1.0, 2.0, 0.1], [1.0, 0.3, -0.2, 0.9], [0.7, 0.2, 0.6, -0.4], [0.8, 0.05, 1.5, 0.25]])
INDEX = torch.tensor([2, 0, 3, 1])
INPUTS = {"logprobs": LOGPROBS, "weights": WEIGHTS, "matrix": MATRIX, "index": INDEX}
# References to the inputs, and to the nodes that a test computes first.
L, W, M, X, B, T = ({"ref": name} for name in ("logprobs", "weights", "matrix", "index", "mask", "stacked"))


def run(loss: CustomLoss, *datums: dict[str, Tensor]) -> CustomLossRun:
    """Runs a graph. `datums` hold every input by name, logprobs too, whose shape the targets take."""
    tokens = [np.zeros(len(datum["logprobs"]), np.int32) for datum in datums]
    columns = {"target_tokens": [np.zeros(datum["logprobs"].shape, np.int64) for datum in datums]}
    for entry in loss.inputs[1:]:
        columns[entry.name] = [datum[entry.name].numpy() for datum in datums]
    ragged = {name: Ragged.of(arrays, arrays[0].dtype) for name, arrays in columns.items()}
    return CustomLossRun(loss, Batch(Ragged.of(tokens, np.int32), ragged))


def node(name: str, target: str, *args: Any, method: bool = False) -> dict[str, Any]:
    kind = "call_method" if method else "call_function"
    return {"op": kind, "name": name, "target": target, "args": list(args), "kwargs": {}}


def graph(*calls: dict[str, Any]) -> CustomLoss:
    """A graph of the calls, and a loss: the sum of the last call's result, as float32, and of the logprobs."""
    start = [{"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}} for name in INPUTS]
    end = [
        node("as_float", "float", {"ref": calls[-1]["name"]}, method=True),
        node("total", "sum", {"ref": "as_float"}, method=True),
        node("own", "sum", L, method=True),
        node("loss", "operator.add", {"ref": "total"}, {"ref": "own"}),
    ]
    metrics = {"custom/total:sum": {"ref": "total"}}
    out = {"op": "output", "name": "output", "target": "output", "args": [[{"ref": "loss"}, {"dict": metrics}]]}
    ranks = [{"name": name, "rank": value.ndim} for name, value in INPUTS.items()]
    return custom_loss.parse("test", ranks, {"format": 1, "nodes": [*start, *calls, *end, out]})

"""Values of every type that the codec knows, and their encodings."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from app.domain import ops
from app.domain.losses import FUNCTION, METHOD, CustomLoss, LossCall, LossInput
from app.domain.ops import (
    AdamParams,
    Batch,
    CreateModel,
    DropGradients,
    ForwardBackward,
    LoadWeights,
    LoraSpec,
    ModelSpec,
    OptimStep,
    Ragged,
    SaveWeights,
)
from app.domain.sampling import Cells, SampleRequest

TOKENS = Ragged.of([np.array([1, 2, 3]), np.array([40_000])], np.int32)
TARGETS = Ragged.of([np.array([[1, -1], [2, 7], [3, 2**40]]), np.array([[5, 6]])], np.int64)
WEIGHTS = Ragged.of([np.array([0.5, 1.0, -0.0]), np.array([np.nan])], np.float32)
NO_ROWS = Ragged.of([np.zeros(0)], np.float32)
BATCH = Batch(TOKENS, {"weights": WEIGHTS, "target_tokens": TARGETS})

INPUTS = (LossInput("logprobs", 1, "n0"), LossInput("rewards", 0, "n1"))
CALLS = (
    LossCall("n2", FUNCTION, "torch.where", ({"ref": "n0"}, 1.5, None, True, "text"), {"dim": {"tuple": [0, 1]}}),
    LossCall("n3", METHOD, "sum", ({"ref": "n2"}, ({"slice": [None, -1, 2]}, {"ellipsis": True})), {}),
)
LOSS = CustomLoss("mine", INPUTS, CALLS, "n3", {"b": "n3", "a": "n2"})

PROMPT = np.array([5, 6, 7], np.int32)
SPARSE = Cells(np.array([5, -1, 7]), np.array([0, 2, 2, 3]), 9, np.array([6, 1, 8]))
DENSE = Cells(np.array([0.25, -1.5], np.float32), np.array([0, 1, 2]), 1)

VALUES: dict[str, Any] = {
    "adam params": AdamParams(),
    "adam params, all set": AdamParams(1e-3, 0.8, 0.99, 1e-8, 0.1, 1.0),
    "batch": BATCH,
    "batch without datums": Batch(Ragged.of([], np.int32), {}),
    "batch with an empty datum": Batch(Ragged.of([np.zeros(0)], np.int32), {"weights": NO_ROWS}),
    "cells, dense": DENSE,
    "cells, sparse": SPARSE,
    "create model": CreateModel(ModelSpec("Qwen/Qwen3-0.6B", LoraSpec(32))),
    "create model, all set": CreateModel(
        ModelSpec("base", LoraSpec(8, False, False, False, 2**31 - 1, 16.0), True),
        "tinker://s:train:0/weights/a",
        True,
        "p",
    ),
    "create model, full": CreateModel(ModelSpec("base", None)),
    "custom loss": LOSS,
    "custom loss, empty": CustomLoss("", (), (), "", {}),
    "drop gradients": DropGradients(),
    "forward": ForwardBackward(BATCH, "cross_entropy", {}, True),
    "forward_backward": ForwardBackward(BATCH, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "forward_backward with a custom loss": ForwardBackward(BATCH, "custom", custom=LOSS),
    "load weights": LoadWeights("tinker://s:train:0/weights/a", False),
    "load weights, all set": LoadWeights("tinker://s:train:0/weights/a", True, "models/s:train:0/weights/a/3-1"),
    "lora spec": LoraSpec(1),
    "loss call": CALLS[1],
    "loss input": INPUTS[0],
    "model spec": ModelSpec("base", None, True),
    "optim step": OptimStep(AdamParams(learning_rate=1e-4)),
    "ragged, int32": TOKENS,
    "ragged, int64 in two dimensions": TARGETS,
    "ragged, float32": WEIGHTS,
    "ragged, empty": Ragged.of([], np.float32),
    "sample request": SampleRequest(PROMPT, 1, 16, 3),
    "sample request, all set": SampleRequest(
        PROMPT, 4, 5, 6, 0.5, 0.9, 3, ("a", "\u00e4"), (1, 2), True, True, 2, 8, SPARSE, 9, 10, True
    ),
    "save weights": SaveWeights("weights", "a"),
    "save weights, all set": SaveWeights(
        "sampler_weights", "", 7200, True, {"b": "2", "a": "1"}, "s:sample:0", True, True, ("age1a", "age1b")
    ),
    # Messages between ranks, which are lists around such values.
    "message": ["apply", [["s:train:0", DropGradients()], ["s:train:1", None]], {"x": 1.5, "y": b"raw"}],
}


def goldens() -> dict[str, Any]:
    """The bytes of each value, and their digest."""
    encoded = {name: ops.encode(value) for name, value in VALUES.items()}
    return {name: {"bytes": data.hex(), "digest": ops.digest(data)} for name, data in encoded.items()}


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, arrays to the bit; a decoded list is a tuple."""
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if is_dataclass(one):
        pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    if isinstance(one, list | tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)

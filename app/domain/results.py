"""The results of Ops, and their accounted usage.

Backends return typed outputs. A worker encodes them to bytes, which a poll returns unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from app.domain.ops import Ragged

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

TRAINED = "training"
"""Tokens of forward and forward_backward calls."""
PREFILLED = "sampling_prefill"
"""Prompt tokens that the engine computed."""
CACHED = "sampling_prefill_cached"
"""Prompt tokens that the engine had in its cache."""
SAMPLED = "sampling_sample"
"""Sampled tokens."""
SAVED = "checkpoint"
"""Checkpoints saved under a path."""
STORED = "storage"
"""Byte-seconds of checkpoints."""
DEVICE = "device"
"""Milliseconds of devices: GPUs, or ranks and samplers on a CPU."""
HOUR_S = 3600
Usage = Mapping[str, int]
"""Amounts by kind."""
NOTHING: Usage = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """logprobs: float32, one array for each datum in request order, each with the shape of its target_tokens.

    metrics: every key is `name:reduction` with exactly one colon; `loss:sum` is always present.

    elementwise_loss: float32, in the shapes of the logprobs, -weight * logprob of each target; None for losses other
    than cross_entropy. The hosted service returns it, and programs read it to log the loss of each token.
    """

    logprobs: Ragged
    metrics: Mapping[str, float]
    elementwise_loss: Ragged | None = None


@dataclass(frozen=True, slots=True)
class CriticOutput:
    """values: float32, one array [N] for each datum in request order, a value for each token of its model_input.
    metrics: as in ForwardBackwardOutput."""

    values: Ragged
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimStepOutput:
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The Op changed the model and has nothing to report."""


Output = ForwardBackwardOutput | CriticOutput | OptimStepOutput | Done


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a finished future: the stored bytes, and a flag for a failed Op."""

    body: bytes
    content_type: str = JSON
    failed: bool = False

    @classmethod
    def failure(cls, why: str) -> Result:
        """The result of an Op that failed through its client's fault."""
        return cls(json.dumps({"error": why, "category": "user"}).encode(), failed=True)


FutureState = Literal["pending", "done", "failed"]

"""The results of requests: typed outputs as the bytes a poll returns, or Requeue for a request that is put off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from app.domain.results import PROTOBUF, CriticOutput, Done, ForwardBackwardOutput, OptimStepOutput, Output, Result
from app.errors import OpError, TinsmithError
from app.wire.results import encode_forward_backward


def of_output(output: Output) -> Result:
    """Converts typed outputs to the bytes a poll returns unchanged."""
    match output:
        case ForwardBackwardOutput() | CriticOutput():
            return Result(encode_forward_backward(output), PROTOBUF)
        case OptimStepOutput():
            return of_json({"metrics": dict(output.metrics)})
        case Done():
            return of_json({})


def of_json(body: Mapping[str, Any]) -> Result:
    return Result(json.dumps(body).encode())


def of_error(error: OpError) -> Result:
    return Result(json.dumps({"error": str(error), "category": error.category}).encode(), failed=True)


class Requeue(TinsmithError):
    """Requeue: the future is not terminal yet, and something else will dispatch it again."""

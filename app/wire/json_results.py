"""Stored results as JSON, for SDKs up to 0.17, whose polls do not accept protobuf.

Worked out anew at each poll from bytes that never change. A float32 comes out as the same number in full digits; one
that is not finite as Python's json, which all of these SDKs read it with, writes it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from app.domain.sampling import UNSCORED, SampledSequence, TokenLogprobs
from app.wire import tinker_pb2 as pb
from app.wire.sampled import decode_sample


def translate(kind: str, body: bytes) -> bytes:
    """The JSON of a result that is stored as protobuf, by its future's kind: sample, forward or forward_backward."""
    read = _sample if kind == "sample" else _forward_backward
    return json.dumps(read(body)).encode()


def _forward_backward(body: bytes) -> dict[str, Any]:
    message = pb.ForwardBackwardOutput.FromString(body)
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [datum for record in message.loss_fn_outputs for datum in _datums(record)],
        "metrics": dict(message.metrics),
    }


def _datums(record: pb.ArrayRecord) -> list[dict[str, Any]]:
    columns = {name: _tensors(batched) for name, batched in record.fields.items()}
    return [{name: tensors[i] for name, tensors in columns.items()} for i in range(record.num_datums)]


def _tensors(batched: pb.BatchedTensor) -> list[dict[str, Any]]:
    cuts = (np.frombuffer(batched.offsets, "<i8") // 4).tolist()
    values, trailing = np.frombuffer(batched.data, "<f4").tolist(), list(batched.trailing_shape)
    width = max(prod(trailing), 1)  # [N, 0] targets are allowed
    return [
        {"data": values[start:stop], "dtype": "float32", "shape": [(stop - start) // width, *trailing]}
        for start, stop in pairwise(cuts)
    ]


def _sample(body: bytes) -> dict[str, Any]:
    output = decode_sample(body)
    result: dict[str, Any] = {"type": "sample", "sequences": [_sequence(found) for found in output.sequences]}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if np.isnan(score) else float(score) for score in output.prompt_logprobs]
    if output.prompt_top is not None:
        result["topk_prompt_logprobs"] = _rows(output.prompt_top)
    return result


def _sequence(found: SampledSequence) -> dict[str, Any]:
    reason = "stop" if found.stopped else "length"
    return {"stop_reason": reason, "tokens": found.tokens.tolist(), "logprobs": found.logprobs.tolist()}


def _rows(top: TokenLogprobs) -> list[list[tuple[int, float]] | None]:
    """For each position its (token, logprob) pairs; None for one that was not scored."""
    rows = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != UNSCORED] or None for row in rows]

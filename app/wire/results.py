"""Encodes results to the bytes that a poll returns: typed outputs to protobuf or JSON, and errors. Decodes a stored
sampling result.

The polls of SDKs up to 0.17 do not accept protobuf, so they get stored results as JSON (`translate`). Each poll
computes the JSON again, from bytes that never change. A float32 is written as the same number in full digits. JSON has
no number that is not finite. Such a metric is left out. Such a logprob is written as Python's json writes it, because
its place counts, and all of these SDKs read it with Python's json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from math import isfinite, prod
from typing import Any

import numpy as np

from app.domain.ops import CreateModel, LoadWeights, Op, Ragged, SaveWeights
from app.domain.results import PROTOBUF, CriticOutput, Done, ForwardBackwardOutput, OptimStepOutput, Output, Result
from app.domain.sampling import UNSCORED, Cells, SampledSequence, SampleOutput, TokenLogprobs
from app.errors import OpError
from app.wire import tinker_pb2 as pb

_RECORD = "ArrayRecord"
_HOSTED_NAMES = {"grad_norm": "unclipped_grad_l2:mean"}
"""Names of metrics of an optim_step in the hosted service (tinker-cookbook issue 331), which dashboards read."""
_SAVES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""The names of the calls that save each kind of checkpoint."""


def encode_forward_backward(output: ForwardBackwardOutput | CriticOutput) -> bytes:
    """A ForwardBackwardOutput message with the fields `logprobs` and `elementwise_loss`, or `values`, datums in order.

    A record holds arrays of one trailing shape, so consecutive datums with the same K make one record.
    """
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type=_RECORD, loss_fn_outputs=_records(_fields(output)), metrics=dict(output.metrics)
    )
    return message.SerializeToString(deterministic=True)


def encode_sample(output: SampleOutput) -> bytes:
    """A SampleResponse message. The logprobs of a sequence are always sent; those of the prompt only when asked for."""
    message = pb.SampleResponse(
        sequences=[_sequence(s) for s in output.sequences], prompt_cache_hit_tokens=output.cached_tokens
    )
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _raw(output.prompt_logprobs, "<f4")
    if output.prompt_top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(output.prompt_top))
    if output.prompt_targets is not None:
        message.target_prompt_logprobs.CopyFrom(_cells(output.prompt_targets))
    if output.prompt_alternatives is not None:
        message.prompt_alt_tokens.CopyFrom(_alternatives(output.prompt_alternatives))
    return message.SerializeToString(deterministic=True)


def _fields(output: ForwardBackwardOutput | CriticOutput) -> dict[str, Ragged]:
    """The arrays of an output by the names of their fields. All have the same shapes."""
    if isinstance(output, CriticOutput):
        return {"values": output.values}
    loss = {} if output.elementwise_loss is None else {"elementwise_loss": output.elementwise_loss}
    return {"logprobs": output.logprobs, **loss}


def _records(fields: Mapping[str, Ragged]) -> Iterator[pb.ArrayRecord]:
    start, shapes = 0, next(iter(fields.values())).shapes
    for trailing, run in groupby(shapes, key=lambda shape: shape[1:]):
        lengths = np.array([0, *(prod(shape) for shape in run)], dtype=np.int64)
        offsets = np.cumsum(lengths)
        stop = start + int(offsets[-1])
        tensors = {
            name: pb.BatchedTensor(
                data=_raw(arrays.values[start:stop], "<f4"),
                offsets=_raw(offsets * 4, "<i8"),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            )
            for name, arrays in fields.items()
        }
        yield pb.ArrayRecord(fields=tensors, num_datums=len(lengths) - 1)
        start = stop


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
        tokens=_raw(sequence.tokens, "<i4"),
        logprobs=_raw(sequence.logprobs, "<f4"),
        topk_sampled_logprobs=None if sequence.top is None else _top(sequence.top),
    )


def _top(top: TokenLogprobs) -> pb.TopkLogprobs:
    length, k = top.tokens.shape
    return pb.TopkLogprobs(token_ids=_raw(top.tokens, "<i4"), logprobs=_raw(top.logprobs, "<f4"), k=k, length=length)


def _cells(cells: Cells) -> pb.Tensor:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=(len(cells.starts) - 1, cells.width))
    if cells.columns is None:
        tensor.dense = _raw(cells.values, "<f4")
    else:
        tensor.sparse_csr.values = _raw(cells.values, "<f4")
        tensor.sparse_csr.crow_indices = _raw(cells.starts, "<i8")
        tensor.sparse_csr.col_indices = _raw(cells.columns, "<i8")
    return tensor


def _alternatives(sampled: TokenLogprobs) -> pb.PromptAltTokens:
    shape = sampled.tokens.shape
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dtype=pb.DTYPE_INT32, shape=shape, dense=_raw(sampled.tokens, "<i4")),
        logprobs=pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, dense=_raw(sampled.logprobs, "<f4")),
    )


def _raw(values: np.ndarray, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def decode_sample(body: bytes) -> SampleOutput:
    """Decodes a SampleResponse, without prompt_targets and prompt_alternatives. Raises
    google.protobuf.message.DecodeError."""
    message = pb.SampleResponse.FromString(body)
    scores = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    return SampleOutput(
        tuple(_read_sequence(sequence) for sequence in message.sequences),
        None if scores is None else np.frombuffer(scores, "<f4"),
        prompt_top=_read_top(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
        cached_tokens=message.prompt_cache_hit_tokens,
    )


def _read_sequence(sequence: pb.SampledSequence) -> SampledSequence:
    return SampledSequence(
        np.frombuffer(sequence.tokens, "<i4"),
        np.frombuffer(sequence.logprobs, "<f4"),
        sequence.stop_reason == pb.STOP_REASON_STOP,
        _read_top(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
    )


def _read_top(found: pb.TopkLogprobs) -> TokenLogprobs:
    shape = (found.length, found.k)
    return TokenLogprobs(
        np.frombuffer(found.token_ids, "<i4").reshape(shape), np.frombuffer(found.logprobs, "<f4").reshape(shape)
    )


def of_output(op: Op, output: Output) -> Result:
    """Converts the typed output of an Op to the bytes a poll returns unchanged."""
    match output:
        case ForwardBackwardOutput() | CriticOutput():
            return Result(encode_forward_backward(output), PROTOBUF)
        case OptimStepOutput():
            return of_call(op, {"metrics": _with_hosted_names(output.metrics)})
        case Done():
            return of_call(op, {})


def of_call(op: Op, body: Mapping[str, Any]) -> Result:
    """The result of an Op as JSON, with the name of its call as `type`. The Elixir SDK takes a poll without one for
    unfinished; the official SDK refuses the name of another call."""
    return of_json({"type": _call(op), **body})


def _call(op: Op) -> str:
    match op:
        case SaveWeights():
            return _SAVES[op.checkpoint_kind]
        case CreateModel(source=str()):  # the SDK creates a model from a checkpoint with load_weights
            return LoadWeights.kind
    return op.kind


def _with_hosted_names(metrics: Mapping[str, float]) -> dict[str, float]:
    return {**metrics, **{_HOSTED_NAMES[name]: value for name, value in metrics.items() if name in _HOSTED_NAMES}}


def of_json(body: Mapping[str, Any]) -> Result:
    """Raises ValueError for a number that is not finite: the SDK does not read it in JSON."""
    return Result(json.dumps(body, allow_nan=False).encode())


def of_error(error: OpError) -> Result:
    return Result(json.dumps({"error": str(error), "category": error.category}).encode(), failed=True)


def translate(kind: str, body: bytes) -> bytes:
    """The JSON of a result stored as protobuf. `kind` is its future's kind: sample, forward or forward_backward."""
    read = _json_sample if kind == "sample" else _json_forward_backward
    return json.dumps(read(body)).encode()


def _json_forward_backward(body: bytes) -> dict[str, Any]:
    message = pb.ForwardBackwardOutput.FromString(body)
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [datum for record in message.loss_fn_outputs for datum in _json_datums(record)],
        "metrics": {name: value for name, value in message.metrics.items() if isfinite(value)},
    }


def _json_datums(record: pb.ArrayRecord) -> list[dict[str, Any]]:
    columns = {name: _json_tensors(batched) for name, batched in record.fields.items()}
    return [{name: tensors[i] for name, tensors in columns.items()} for i in range(record.num_datums)]


def _json_tensors(batched: pb.BatchedTensor) -> list[dict[str, Any]]:
    cuts = (np.frombuffer(batched.offsets, "<i8") // 4).tolist()
    values, trailing = np.frombuffer(batched.data, "<f4").tolist(), list(batched.trailing_shape)
    width = max(prod(trailing), 1)  # [N, 0] targets are allowed
    return [
        {"data": values[start:stop], "dtype": "float32", "shape": [(stop - start) // width, *trailing]}
        for start, stop in pairwise(cuts)
    ]


def _json_sample(body: bytes) -> dict[str, Any]:
    output = decode_sample(body)
    result: dict[str, Any] = {"type": "sample", "sequences": [_json_sequence(found) for found in output.sequences]}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if np.isnan(score) else float(score) for score in output.prompt_logprobs]
    if output.prompt_top is not None:
        result["topk_prompt_logprobs"] = _json_rows(output.prompt_top)
    return result


def _json_sequence(found: SampledSequence) -> dict[str, Any]:
    reason = "stop" if found.stopped else "length"
    return {"stop_reason": reason, "tokens": found.tokens.tolist(), "logprobs": found.logprobs.tolist()}


def _json_rows(top: TokenLogprobs) -> list[list[tuple[int, float]] | None]:
    """The (token, logprob) pairs of each position; None for a position that was not scored."""
    rows = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != UNSCORED] or None for row in rows]

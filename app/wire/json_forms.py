"""The JSON forms of bodies, for SDKs up to 0.24, and of results, for SDKs up to 0.17; JSON tensors too.

The polls of SDKs up to 0.17 do not accept protobuf, so they get stored results as JSON. Each poll computes the JSON
again, from bytes that never change. A float32 is written as the same number in full digits. A float32 that is not
finite is written as Python's json writes it, because all of these SDKs read it with Python's json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from app.domain.ops import ForwardBackward
from app.domain.sampling import UNSCORED, SampledSequence, TokenLogprobs
from app.errors import BadRequest
from app.wire import tinker_pb2 as pb
from app.wire.forward_backward import BatchHeader, Envelope, FindLoss, build_op
from app.wire.results import decode_sample

_FORWARD = "forward_input"
_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}
_NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


def open_envelope(body: Any) -> Envelope:
    """Reads the envelope of a JSON body. Raises BadRequest when model_id or seq_id is missing; `decode` checks the
    rest."""
    if not isinstance(body, dict) or not isinstance(body.get("model_id"), str):
        raise BadRequest("model_id must be a string")
    seq = body.get("seq_id")
    if not isinstance(seq, int) or isinstance(seq, bool):
        raise BadRequest(f"seq_id must be an integer (got {str(seq)[:80]!r})")
    content = body.get(_input_of(body))
    data = content.get("data") if isinstance(content, dict) else None
    datums = len(data) if isinstance(data, list) else 0
    return Envelope(body["model_id"], seq, _FORWARD in body, datums, lambda find: _to_op(body, find))


def text_tokens(chunks: Any, what: str) -> np.ndarray:
    """int32 [n] of encoded_text chunks. Raises BadRequest for other chunks and for values that are not int32."""
    parts = [_chunk_tokens(chunk, what) for chunk in _list(chunks, what)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _chunk_tokens(chunk: Any, what: str) -> np.ndarray:
    if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
        kind = chunk.get("type") if isinstance(chunk, dict) else type(chunk).__name__
        raise BadRequest(f"{what}: a chunk of type {str(kind)[:40]!r}; only encoded_text is supported")
    values = _numbers(chunk.get("tokens"), f"{what}: tokens")
    if values.size and values.dtype.kind != "i":
        raise BadRequest(f"{what}: tokens must be a list of integers")
    if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
        raise BadRequest(f"{what}: token {max(values, key=abs)} is no 32-bit integer")
    return values.astype(np.int32)


def _to_op(body: Mapping[str, Any], find: FindLoss) -> ForwardBackward:
    forward_only, name = _FORWARD in body, _input_of(body)
    content = body.get(name)
    if not isinstance(content, dict) or not isinstance(content.get("loss_fn"), str):
        raise BadRequest(f"{name} must be an object with data and loss_fn")
    data = _list(content.get("data"), "data")
    head = BatchHeader.of(content["loss_fn"], _loss_config(content.get("loss_fn_config")), forward_only, find)
    tokens = [_tokens(datum, i) for i, datum in enumerate(data)]
    return build_op(head, tokens, [_inputs(datum, head.taken, i) for i, datum in enumerate(data)])


def _input_of(body: Mapping[str, Any]) -> str:
    return _FORWARD if _FORWARD in body else "forward_backward_input"


def _tokens(datum: Any, i: int) -> np.ndarray:
    if not isinstance(datum, dict) or not isinstance(datum.get("model_input"), dict):
        raise BadRequest(f"datum {i}: model_input must be an object with chunks")
    return text_tokens(datum["model_input"].get("chunks"), f"datum {i}: model_input")


def _inputs(datum: Mapping[str, Any], names: Sequence[str], i: int) -> dict[str, pb.Tensor]:
    given = datum.get("loss_fn_inputs")
    if not isinstance(given, dict):
        raise BadRequest(f"datum {i}: loss_fn_inputs must be an object")
    return {name: tensor(given[name], f"datum {i}: {name}") for name in names if name in given}


def tensor(given: Any, what: str) -> pb.Tensor:
    """Converts a JSON tensor to the message of a protobuf body, so that shapes and sparse rows are checked in one
    place.

    Raises BadRequest for a value that is not a tensor; `what` names it there.
    """
    if not isinstance(given, dict) or str(given.get("dtype")) not in _DTYPES:
        raise BadRequest(f"{what}: expected data, shape and a dtype of {', '.join(_DTYPES)}")
    name = given["dtype"]
    message = pb.Tensor(dtype=_DTYPES[name], shape=_sizes(given.get("shape") or [], what))
    data = _bytes(given.get("data"), _NUMPY[name], what)
    if given.get("sparse_crow_indices") is None:
        message.dense = data
    else:
        message.sparse_csr.values = data
        message.sparse_csr.crow_indices = _bytes(given["sparse_crow_indices"], _NUMPY["int64"], what)
        message.sparse_csr.col_indices = _bytes(given.get("sparse_col_indices"), _NUMPY["int64"], what)
    return message


def _sizes(given: Any, what: str) -> list[int]:
    sizes = _list(given, what)
    if not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
        raise BadRequest(f"{what}: shape must be a list of sizes")
    return sizes


def _bytes(given: Any, dtype: np.dtype, what: str) -> bytes:
    values = _numbers(given, what)
    if values.size and dtype.kind == "i" and values.dtype.kind != "i":
        raise BadRequest(f"{what}: the values must be integers")
    return values.astype(dtype).tobytes()


def _numbers(given: Any, what: str) -> np.ndarray:
    try:
        values = np.array(_list(given, what) or np.empty(0))
    except ValueError:
        raise BadRequest(f"{what}: expected a flat list of numbers") from None
    if values.ndim != 1 or values.dtype.kind not in "if":
        raise BadRequest(f"{what}: expected a flat list of numbers")
    return values


def _list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list):
        raise BadRequest(f"{what}: expected a list, got {type(given).__name__}")
    return given


def _loss_config(given: Any) -> dict[str, float | str]:
    config = given or {}
    if not isinstance(config, dict):
        raise BadRequest("loss_fn_config must be an object")
    for key, value in config.items():
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise BadRequest(f"loss_fn_config {key[:80]!r} must be a number")
    try:
        return {key: value if isinstance(value, str) else float(value) for key, value in config.items()}
    except OverflowError:
        raise BadRequest("loss_fn_config holds a number beyond 1e308") from None


def translate(kind: str, body: bytes) -> bytes:
    """The JSON of a result stored as protobuf. `kind` is its future's kind: sample, forward or forward_backward."""
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
    """The (token, logprob) pairs of each position; None for a position that was not scored."""
    rows = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != UNSCORED] or None for row in rows]

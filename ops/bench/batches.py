"""One batch of random tokens, in each form that the sides take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
import tinker
from tinker import types

from app.domain.ops import AdamParams, Batch, ForwardBackward, Ragged
from app.wire import tinker_pb2 as pb

LOSS = "cross_entropy"
ADAM = AdamParams(learning_rate=1e-4, eps=1e-8)


def random_tokens(rows: int, length: int, vocab_size: int) -> np.ndarray:
    """Returns int32 [rows, length], the same on every call."""
    return np.random.default_rng(0).integers(0, vocab_size, size=(rows, length), dtype=np.int32)


def targets(tokens: np.ndarray) -> np.ndarray:
    """Returns int64 [rows, length]: the next token. The last token's target has weight 0 (see `weights`)."""
    return np.roll(tokens, -1, axis=1).astype(np.int64)


def weights(tokens: np.ndarray) -> np.ndarray:
    """Returns float32 [rows, length]: 1, and 0 for the last token, whose successor is unknown."""
    found = np.ones(tokens.shape, dtype=np.float32)
    found[:, -1] = 0
    return found


def rates(tokens: int, samples_ms: Sequence[float]) -> dict[str, float]:
    """Tokens per second in the best and in the median pass over `tokens`."""
    found = [tokens / ms * 1000 for ms in samples_ms]
    return {"best": max(found), "median": median(found)}


def datums(tokens: np.ndarray) -> list[types.Datum]:
    """Datums for the SDK."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row.tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(target),
                "weights": tinker.TensorData.from_numpy(weight),
            },
        )
        for row, target, weight in zip(tokens, targets(tokens), weights(tokens), strict=True)
    ]


def sdk_adam() -> types.AdamParams:
    return types.AdamParams(learning_rate=ADAM.learning_rate, beta1=ADAM.beta1, beta2=ADAM.beta2, eps=ADAM.eps)


def operation(tokens: np.ndarray) -> ForwardBackward:
    """Operation for a training backend."""
    inputs = {
        "target_tokens": Ragged.of(list(targets(tokens)), np.int64),
        "weights": Ragged.of(list(weights(tokens)), np.float32),
    }
    return ForwardBackward(Batch(Ragged.of(list(tokens), np.int32), inputs), LOSS)


def request(tokens: np.ndarray, model_id: str) -> pb.ForwardBackwardRequest:
    """Body for the HTTP API; every call sets its own seq_id."""
    return pb.ForwardBackwardRequest(
        model_id=model_id,
        loss_fn=LOSS,
        data=[
            pb.Datum(
                model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=row.tobytes()))],
                loss_fn_inputs={
                    "target_tokens": pb.Tensor(dense=target.tobytes(), dtype=pb.DTYPE_INT64, shape=target.shape),
                    "weights": pb.Tensor(dense=weight.tobytes(), dtype=pb.DTYPE_FLOAT32, shape=weight.shape),
                },
            )
            for row, target, weight in zip(tokens, targets(tokens), weights(tokens), strict=True)
        ],
    )

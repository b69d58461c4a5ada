"""The batch of `batches`, and its optimizer's parameters, as the SDK or the HTTP API takes them."""

from __future__ import annotations

import numpy as np
import tinker
from tinker import types

from app.wire import tinker_pb2 as pb
from ops.bench import batches


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
        for row, target, weight in zip(tokens, batches.targets(tokens), batches.weights(tokens), strict=True)
    ]


def adam() -> types.AdamParams:
    """Optimizer parameters for the SDK."""
    own = batches.ADAM
    return types.AdamParams(learning_rate=own.learning_rate, beta1=own.beta1, beta2=own.beta2, eps=own.eps)


def request(tokens: np.ndarray, model_id: str) -> pb.ForwardBackwardRequest:
    """Body for the HTTP API; every call sets its own seq_id."""
    return pb.ForwardBackwardRequest(
        model_id=model_id,
        loss_fn=batches.LOSS,
        data=[
            pb.Datum(
                model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=row.tobytes()))],
                loss_fn_inputs={
                    "target_tokens": pb.Tensor(dense=target.tobytes(), dtype=pb.DTYPE_INT64, shape=target.shape),
                    "weights": pb.Tensor(dense=weight.tobytes(), dtype=pb.DTYPE_FLOAT32, shape=weight.shape),
                },
            )
            for row, target, weight in zip(tokens, batches.targets(tokens), batches.weights(tokens), strict=True)
        ],
    )

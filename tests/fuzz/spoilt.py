"""forward_backward bodies that are valid except for a few fields, so that errors are found as deep as possible."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tinker.proto import tinker_public_pb2 as sdk

from app.domain.losses import LOSSES
from tests import pictures
from tests.unit.app.conftest import VOCAB, batch

SIZES = (0, 1, 2, 3, 4, -1, -(2**62), 2**31, 2**40, 2**62)
NUMBERS = (0, 1, 2, 3, -1, VOCAB, 2**31, -(2**63), 2**63 - 1)
FLOATS = (0.0, -1.0, 0.5, 1e-320, 1e308, -1e308, float("inf"), float("nan"))
TEXTS = ("", "x", "\x00", "../..", "loss_id", "beta", "\U0001f600", "a" * 5000)
DTYPES = (0, 1, 2, 3, 4, 99)
PICTURE = pictures.encoded(pictures.picture(2, 2))


def request(model_id: str, draw: random.Random) -> sdk.ForwardBackwardRequest:
    """Datums as one of the losses takes them, dense or sparse, with none to three faults."""
    loss = draw.choice(sorted(LOSSES))
    inputs = {name: [1.0, 0.5, 0.25] for name in (*LOSSES[loss].inputs, *LOSSES[loss].optional) if name != TARGETS}
    message = batch(model_id, draw.choice((1, 2, 3, 1, 2, 3, 0, -1, 2**31 - 1)), loss_fn=loss, **inputs)
    if TARGETS in LOSSES[loss].inputs:
        message.data[0].loss_fn_inputs[TARGETS].CopyFrom(batch("", 1).data[0].loss_fn_inputs[TARGETS])
    for _ in range(draw.randrange(3)):
        message.data.add().CopyFrom(message.data[0])
    if draw.random() < 0.3:
        for datum in message.data:
            for tensor in datum.loss_fn_inputs.values():
                _make_sparse(tensor)
    for _ in range(draw.randrange(4)):
        draw.choice(FAULTS)(message, draw)
    return message


def damaged(body: bytes, draw: random.Random) -> bytes:
    """The body, mostly unchanged; else with some bytes changed, left out or inserted."""
    place, some = draw.randrange(len(body) + 1), bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    kept = (body, body, body, body[:place], body[:place] + some + body[place:], body[:place] + some + body[place + 4 :])
    return draw.choice(kept)


TARGETS = "target_tokens"
Fault = Callable[[sdk.ForwardBackwardRequest, random.Random], None]


def _make_sparse(tensor: sdk.Tensor) -> None:
    """Three rows of one value each, in the first of two columns."""
    values = tensor.dense
    tensor.sparse_csr.values = values
    tensor.sparse_csr.crow_indices = np.arange(4, dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.zeros(3, "<i8").tobytes()
    tensor.shape[:] = [3, 2]


def _tensor(message: sdk.ForwardBackwardRequest, draw: random.Random) -> sdk.Tensor:
    inputs = draw.choice(message.data).loss_fn_inputs
    return inputs[draw.choice(sorted(inputs) or ["x"])]


def _shape(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    tensor = _tensor(message, draw)
    if tensor.shape and draw.random() < 0.7:
        tensor.shape[draw.randrange(len(tensor.shape))] = draw.choice(SIZES)
    else:
        tensor.shape[:] = [draw.choice(SIZES) for _ in range(draw.choice((0, 1, 2, 2, 3, 100)))]


def _dtype(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    _tensor(message, draw).dtype = draw.choice(DTYPES)  # type: ignore[assignment]


def _dense(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    _tensor(message, draw).dense = draw.choice((_numbers(draw), _floats(draw), b"", b"abc"))


def _sparse(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    part = draw.choice(("values", "crow_indices", "col_indices"))
    setattr(_tensor(message, draw).sparse_csr, part, draw.choice((_numbers(draw), _floats(draw), b"", b"abc")))


def _tokens(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    chunks = draw.choice(message.data).model_input
    if draw.random() < 0.4:
        image = chunks.add().image
        image.data, image.format = damaged(PICTURE, draw), draw.choice(("png", "png", "jpeg", *TEXTS))
        if draw.random() < 0.8:
            image.expected_tokens = draw.choice((1, 2, 3, 0, -1, 2**31 - 1))
    else:
        chunks.add().encoded_text.tokens = draw.choice((_numbers(draw), b"", b"abc", bytes(4)))


def _setting(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    value = message.loss_fn_config_v2[draw.choice(("beta", "clip_low_threshold", "clip_high_threshold", *TEXTS))]
    if draw.random() < 0.5:
        value.number = draw.choice(FLOATS)
    else:
        value.text = draw.choice(TEXTS)


def _left_out(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    inputs = draw.choice(message.data).loss_fn_inputs
    for name in sorted(inputs)[: draw.randrange(1, 3)]:
        del inputs[name]


def _loss(message: sdk.ForwardBackwardRequest, draw: random.Random) -> None:
    message.loss_fn, message.forward_only = draw.choice((*sorted(LOSSES), "custom", *TEXTS)), draw.random() < 0.5


def _numbers(draw: random.Random) -> bytes:
    return np.array([draw.choice(NUMBERS) for _ in range(draw.randrange(6))], "<i8").tobytes()


def _floats(draw: random.Random) -> bytes:
    with np.errstate(over="ignore"):
        return np.array([draw.choice(FLOATS) for _ in range(draw.randrange(6))], "<f4").tobytes()


FAULTS: tuple[Fault, ...] = (_shape, _shape, _dtype, _dense, _sparse, _tokens, _setting, _left_out, _loss)

"""Programs of test_full_gradients.py: ranks of a full fine-tune, and the gradients that they hold."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.domain.ops import ForwardBackward
from app.errors import UserOpError
from app.settings import BaseModelSettings
from tests.parity.datums import batch, supervised
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create
from workers.backends.training.engine import Engine
from workers.backends.training.trainer import Trainer

# Three micro-batches of 64 tokens, so that the second of two ranks has none in the second round.
UNEVEN = ForwardBackward(batch(supervised(1, (60, 50, 40))), "cross_entropy")
# A layer has 11 tensors.
RUNS_OUT_AT = 15


def gradients(backend: Trainer) -> Mapping[str, np.ndarray]:
    """The pending gradient of a new model after two Ops."""
    backend.apply({"a": Create(None)})
    for _ in range(2):
        backend.apply({"a": UNEVEN})
    return backend.gradients("a")


def opened(settings: str) -> Trainer:
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings), full=True)
    backend.open()
    return backend


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def watched(settings: str, folder: str) -> None:
    """Writes rank 0's part of the gradient, and for each rank the most bytes of gradients that it held. Nothing holds
    the model once it is closed."""
    backend = opened(settings)
    weights, peak = [*backend._engine.trained.values()], 0

    def note(_: object) -> None:
        nonlocal peak
        peak = max(peak, sum(weight.grad.nbytes for weight in weights if weight.grad is not None))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(note)
    if is_first():
        np.savez(Path(folder) / "found.npz", **gradients(backend))
        state = weakref.ref(backend._states["a"])
        backend.close("a")
        assert state() is None
        backend.shutdown()
    else:
        backend.follow()
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(peak))
    ranks.end()


def fails_midway(settings: str) -> None:
    """Memory runs out on the second rank, within a backward pass. Then a weight is also used
    before its layer, so its gradient comes too late."""
    backend = opened(settings)
    if not is_first():
        run_out_once()
        with suppress(RuntimeError):  # the first rank is gone
            backend.follow()
        ranks.end()
    backend.apply({"b": Create(None)})
    result = backend.apply({"b": UNEVEN})["b"]
    assert isinstance(result, UserOpError) and "memory ran out" in str(result), result
    assert backend.healthy()
    assert not backend.gradients("b")
    backend.apply({"b": UNEVEN})
    once = {name: gradient.tobytes() for name, gradient in backend.gradients("b").items()}
    backend.apply({"a": Create(None)})
    backend.apply({"a": UNEVEN})
    assert once == {name: gradient.tobytes() for name, gradient in backend.gradients("a").items()}
    weight = backend._engine.base.model.model.layers[1].mlp.up_proj.weight
    with added_to_embeddings(backend, weight), pytest.raises(RuntimeError, match="no gradient yet"):
        backend.apply({"a": UNEVEN})
    assert not backend.healthy()
    ranks.end()


def run_out_once() -> None:
    """Fails once, among the tensors of the second layer from the end."""
    take_gradient, taken = Engine.take_gradient, 0

    def run_out(engine: Engine, parameter: nn.Parameter) -> Tensor | None:
        nonlocal taken
        taken += 1
        if taken == RUNS_OUT_AT:
            raise torch.OutOfMemoryError("of the test's own making")
        return take_gradient(engine, parameter)

    Engine.take_gradient = run_out


@contextmanager
def added_to_embeddings(backend: Trainer, weight: Tensor) -> Iterator[None]:
    embedding = backend._engine.base.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, inputs, output: output + weight.sum())
    try:
        yield
    finally:
        hook.remove()

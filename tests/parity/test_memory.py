"""Recomputed layers save memory and change no bit of a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised
from workers.backends.training import backends, memory
from workers.backends.training.base import Create
from workers.backends.training.trainer import Trainer

LENGTHS = (23, 7, 40, 2, 31, 60, 60)
LAYERS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)


def opened(base: Path, dtype: str = "float32", **trainer: Any) -> Trainer:
    """Opens a trainer with two models, of different adapters, one step from their start."""
    torch.set_num_threads(1)
    trainer = {"backend": "torch", "micro_batch_tokens": 128, **trainer}
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype=dtype, trainer=trainer))
    backend.open()
    backend.apply({"a": Create(LoraSpec(rank=4, seed=1)), "b": Create(LoraSpec(rank=8, seed=2, train_mlp=False))})
    both(backend, 0)
    step = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8))
    backend.apply({"a": step, "b": step})
    return backend


def both(backend: Trainer, seed: int) -> dict[str, np.ndarray]:
    """A pass over both models: their outputs and their gradients."""
    ops = {
        model: ForwardBackward(batch(supervised(seed + i, LENGTHS)), "cross_entropy")
        for i, model in enumerate(("a", "b"))
    }
    found = {f"{model} logprobs": output.logprobs.values for model, output in backend.apply(ops).items()}
    for model in ops:
        found |= {f"{model} {name}": gradient for name, gradient in backend.gradients(model).items()}
    return found


def reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@contextmanager
def kept_bytes(backend: Trainer) -> Iterator[list[int]]:
    """Bytes that autograd keeps from a forward for its backward, without the base's weights.

    They are counted tensor by tensor, with each storage counted once.
    """
    kept: list[int] = []
    # Weak references: their storages' ids are not given to others, as addresses are once a micro-batch has been freed.
    seen = {ref.cdata: ref for ref in map(reference, backend._engine.base.model.parameters())}

    def pack(tensor: Tensor) -> Tensor:
        if (ref := reference(tensor)).cdata not in seen:
            seen[ref.cdata] = ref
            kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


ENGINES = pytest.mark.parametrize(
    "trainer", [{"backend": "torch"}, {"backend": "deepspeed", "zero_stage": 3}], ids=["torch", "zero-3"]
)


@ENGINES
def test_layers_computed_again_give_the_same_gradients_from_less_memory(
    base: Path, trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and the first half of them."""
    kept = {}
    for setting in (False, True, "auto"):
        monkeypatch.setattr(memory, "choose", lambda *_, **__: LAYERS // 2)
        backend = opened(base, **trainer, activation_checkpointing=setting)
        with kept_bytes(backend) as found:
            results = both(backend, 5)
        kept[setting] = sum(found)
        if not setting:
            wanted = results
        assert all(np.array_equal(results[name], wanted[name]) for name in wanted)
    assert kept[True] < kept[False] / 3
    assert kept["auto"] == pytest.approx((kept[True] + kept[False]) / 2, rel=0.1)


@ENGINES
@pytest.mark.parametrize("again", range(1, LAYERS + 1))
def test_sixteen_uneven_tenants_have_the_same_bits_whichever_layers_are_computed_again(
    base: Path, trainer: dict[str, Any], again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = of_sixteen(base, **trainer, activation_checkpointing=False)
    layers = set()
    recomputed = memory._recomputed

    def noted(run: Any, *given: Any) -> Any:
        # transformers 5.20 and later give the layer as the first argument.
        layer = getattr(run.func, "__self__", None) or run.args[0]
        layers.add(layer.self_attn.layer_idx)
        return recomputed(run, *given)

    monkeypatch.setattr(memory, "_recomputed", noted)
    monkeypatch.setattr(memory, "choose", lambda *_, **__: again)
    assert of_sixteen(base, **trainer, activation_checkpointing="auto") == wanted
    assert layers == set(range(again))


def of_sixteen(base: Path, **trainer: Any) -> dict[str, bytes]:
    """A pass of sixteen tenants of many ranks and lengths: their logprobs and gradients, as bytes."""
    torch.set_num_threads(1)
    trainer = {"micro_batch_tokens": 256, **trainer}
    backend = backends.create(BaseModelSettings(name="tiny", path=str(base), dtype="float32", trainer=trainer))
    backend.open()
    models = [f"m{tenant}" for tenant in range(16)]
    backend.apply({m: Create(LoraSpec(rank=1 + i % 5, seed=i, train_mlp=i % 3 > 0)) for i, m in enumerate(models)})
    ops = {
        m: ForwardBackward(batch(supervised(i, [5 + 3 * i, 40 - i][: 1 + i % 2])), "cross_entropy")
        for i, m in enumerate(models)
    }
    found = {m: output.logprobs.values.tobytes() for m, output in backend.apply(ops).items()}
    for m in models:
        found |= {f"{m} {name}": gradient.tobytes() for name, gradient in backend.gradients(m).items()}
    return found

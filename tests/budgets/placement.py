"""Trains on a stand-in for a GPU, where an operation on tensors of two devices is an error, and prints errors and waits
as JSON.

Every family in bf16, and every loss, kind of model and setting that brings other tensors to the device. It has a
process of its own, as `tests.budgets` has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.domain import losses
from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep, Ragged
from app.errors import OpError
from app.settings import BaseModelSettings, TrainerSettings
from tests import pictures
from tests.budgets.accelerator import DEVICE, counted
from tests.custom_losses import parsed, square
from tests.parity import architectures, test_images
from tests.parity.datums import batch, data, supervised
from workers.backends.training import backends
from workers.backends.training.base import BackendOp, Create
from workers.backends.training.engine import HiddenStates
from workers.backends.training.states.full import FullFinetuneState
from workers.backends.training.trainer import Trainer
from workers.models import base_model, experts, lora
from workers.models.tensor_parallel import SplitLayers

Ops = Sequence[ForwardBackward]
Trained = tuple[Trainer, int]
"""A trainer, and how often the host waited for the device in its last pass, which is of one micro-batch."""
_STEP = OptimStep(AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0))
_UNEVEN = (23, 9, 40), (9, 3, 3)
_LAYERS, _EXPERTS = 2, 4  # of every case in tests/parity/architectures.py


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Trained]]]:
    """Yields each case by name, with what trains it."""
    for case in architectures.CASES:
        yield case, partial(_trained, architectures.build(case, folder / case), _ops("cross_entropy"))
    dense, sparse = (partial(_trained, folder / case) for case in ("llama", "qwen3-moe"))
    alone, *_ = both = _ops("cross_entropy")
    for loss, spec in losses.LOSSES.items():
        if loss != losses.CUSTOM:
            yield loss, partial(dense, _ops(loss), critic=spec.critic)
    custom = parsed(square, {"logprobs": 1})
    yield "custom loss", partial(dense, [replace(op, loss_fn=losses.CUSTOM, custom=custom) for op in both])
    yield "entropy", partial(dense, [replace(op, loss_config={losses.ENTROPY: 0.1}) for op in both])
    yield "three targets", partial(dense, [ForwardBackward(batch(supervised(0, (9, 4), width=3)), "cross_entropy")])
    yield "forward only", partial(dense, [replace(op, forward_only=True) for op in both])
    yield "one model", partial(dense, [alone])
    yield "full fine-tuning", partial(dense, [alone], full=True)
    yield "full fine-tuned critic", partial(dense, _ops("ppo_critic")[:1], full=True, critic=True)
    yield "offloaded", partial(dense, [alone], full=True, offload=True)
    for dtype in ("float32", "nf4", "int8", "fp8"):
        yield dtype, partial(dense, both, dtype=dtype)
    for again in (False, True):
        routed = [_routed(op) for op in both]
        yield f"given experts, layers again: {again}", partial(sparse, routed, activation_checkpointing=again)
    for case in ("llama", "qwen3-moe"):
        yield f"{case}, a rank's part of the layers", partial(_in_part, folder / case)
    seeing = pictures.tiny_reader("qwen3-vl-moe", folder / "seeing")
    yield "images", partial(_trained, seeing, [test_images.op(0), *both])


def _ops(loss: str) -> list[ForwardBackward]:
    return [ForwardBackward(batch(data(loss, seed, lengths)), loss) for seed, lengths in enumerate(_UNEVEN)]


def _routed(op: ForwardBackward) -> ForwardBackward:
    """The Op with experts for each token."""
    rng = np.random.default_rng(0)
    routes = [rng.random((n, _LAYERS, _EXPERTS)).argsort(-1)[..., :2] for (n,) in op.batch.tokens.shapes]
    return replace(op, batch=replace(op.batch, routes=Ragged.of(routes, np.uint8)))


def _trained(
    base: Path, ops: Ops, *, dtype: str = "bfloat16", critic: bool = False, full: bool = False, **settings: Any
) -> Trained:
    """Two passes and a step of a model for each Op, which share the passes. The first model is saved and read between
    the passes."""
    named = BaseModelSettings(name="tests", path=str(base), dtype=dtype, trainer={"backend": "torch", **settings})
    trainer = backends.create(named, full=full)
    trainer.open()
    models = {f"m{number}": op for number, op in enumerate(ops)}
    for number, model in enumerate(models):
        spec = None if full else LoraSpec(rank=4 << number, train_mlp=number == 0)
        _apply(trainer, {model: Create(spec, critic=critic)})
    _apply(trainer, models)
    with TemporaryDirectory() as saved:
        trainer.capture("m0", optimizer=True, gradients=True)(Path(saved))
        _apply(trainer, {"m0": Create(None, Path(saved), optimizer=True, critic=critic, gradients=True)})
    with counted() as counts:
        _apply(trainer, models)
    _apply(trainer, dict.fromkeys(models, _STEP))
    return trainer, counts.waits.total()


def _in_part(base: Path) -> tuple[Any, int]:
    """A pass of the part of the layers that one rank of two keeps. It is not added to the other part."""
    named = BaseModelSettings(name="tests", path=str(base), dtype="bfloat16")
    layers = SplitLayers(base_model.skeleton(named), 1, 2, None)
    loaded = base_model.load(named, DEVICE, lambda name, parameter: layers.split(name, parameter))
    lora.wrap(loaded.model)
    for module in experts.found(loaded.model).values():
        experts.keep(module, range(_EXPERTS // 2, _EXPERTS))
    adapters = [lora.new_adapter(loaded.model, LoraSpec(rank=rank)).to(DEVICE) for rank in (4, 8)]
    hidden_states = HiddenStates(loaded.model, TrainerSettings(activation_checkpointing=False))
    tokens = torch.zeros(24, dtype=torch.int64, device=DEVICE)
    hidden_states(tokens, (10, 14), [(layers.own(adapter), 1) for adapter in adapters]).float().sum().backward()
    gradients = [tensor.grad for adapter in adapters for pair in adapter.pairs.values() for tensor in (pair.a, pair.b)]
    states = {"gradients": SimpleNamespace(tensors=lambda: [one for one in gradients if one is not None])}
    return SimpleNamespace(_engine=SimpleNamespace(base=loaded), _states=states), 0


def _apply(trainer: Trainer, ops: Mapping[str, BackendOp]) -> None:
    for outcome in trainer.apply(ops).values():
        if isinstance(outcome, OpError):
            raise outcome


def _result(run: Callable[[], Trained]) -> tuple[str, int]:
    """The first error of a case, or the tensors of the trainer that are off the device, "" for none; and its waits."""
    try:
        trainer, waits = run()
    except Exception as error:
        return repr(error)[:300], 0
    model = trainer._engine.base.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, state in trainer._states.items():
        tensors |= {f"{name} {number}": tensor for number, tensor in enumerate(_tensors(state))}
    return ", ".join(name for name, tensor in tensors.items() if tensor.device != DEVICE)[:300], waits


def _tensors(state: Any) -> Iterator[Tensor]:
    """Those of an adapter; a full fine-tune may keep its own in host memory."""
    return iter(()) if isinstance(state, FullFinetuneState) else state.tensors()


if __name__ == "__main__":
    torch.set_num_threads(1)
    backends.rank_device = lambda settings: DEVICE
    with TemporaryDirectory() as made, counted():
        results = {name: _result(run) for name, run in cases(Path(made))}
        results["two devices"] = _result(lambda: torch.ones(2, device=DEVICE) + torch.ones(2))
        print(json.dumps(results))

"""Router replay: the routers of a model record the experts that they choose, or take given ones.

A router makes the weights of its experts by its own formula in both cases, because only its choice is replaced: the
outcome of its last top-k over the experts. A context variable holds what a pass asks for, as in workers.models.lora.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.domain.routes import dtype_of
from app.errors import UnservableModel
from app.settings import BaseModelSettings
from workers.models import base_model, coverage

NO_ROUTE = -1
"""Stands in the place of an expert where a router chooses by itself."""
_ROUTERS = {
    "DeepseekV3TopkRouter",
    "DeepseekV32TopkRouter",
    "Glm4MoeLiteTopkRouter",
    "Glm4MoeTopkRouter",
    "GptOssTopKRouter",
    "InklingTopkRouter",
    "KimiLinearTopkRouter",
    "MiniMaxM2TopKRouter",
    "MixtralTopKRouter",
    "NemotronHTopkRouter",
    "OlmoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "Qwen3NextTopKRouter",
    "Qwen3VLMoeTextTopKRouter",
    "Qwen3_5MoeTopKRouter",
}
"""The classes that return (logits, weights, indices, ...), and choose by torch.topk. Others of such names do not."""


class Recorder:
    """The experts that the routers chose in the latest pass."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}
        self._experts = 0

    def note(self, layer: int, chosen: Tensor, experts: int) -> None:
        """Keeps a layer's choice [tokens, top_k] among `experts`."""
        self._chosen[layer], self._experts = chosen, experts

    def take(self, rows: int) -> np.ndarray:
        """Returns the routes of a pass over [rows, columns] tokens, [rows, columns, layers, top_k], in the dtype that
        app.domain.routes gives them."""
        layers = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], 1)
        routes: np.ndarray = layers.cpu().numpy().astype(dtype_of(self._experts))
        return routes.reshape(rows, -1, *routes.shape[1:])


Request = Tensor | Recorder | None
_request: ContextVar[Request] = ContextVar("routes", default=None)


def found(model: nn.Module) -> list[Any]:
    """The routers, in the model's order."""
    return [module for module in model.modules() if type(module).__name__ in _ROUTERS]


def check_replayable(settings: BaseModelSettings) -> None:
    """Raises UnservableModel when not every layer with experts has a router of a known form; SetupError as
    `base_model.skeleton` does."""
    model = base_model.skeleton(settings)
    layers = {path.partition(".experts")[0] for path, _ in model.named_modules() if coverage.trains_experts(path)}
    if not layers or len(found(model)) != len(layers):
        reason = "has routers of an unknown form" if layers else "has no experts"
        raise UnservableModel(
            f"base model {settings.name!r} ({model.config.architectures[0]}) {reason}, so router_replay cannot be on; "
            "turn it off"
        )


def wrap(model: nn.Module) -> None:
    """Makes the model's routers obey `use`. Outside of its blocks they are unchanged, to the bit."""
    for layer, router in enumerate(found(model)):
        shape = getattr(router.weight, "ds_shape", router.weight.shape)  # ZeRO-3 empties it
        experts = shape[0] - getattr(router, "n_shared_experts", 0)  # Inkling scores shared ones too
        router.forward = partial(_forward, layer, router.forward, experts)


@contextmanager
def use(request: Request) -> Iterator[None]:
    """Makes the passes within the block take these experts, int64 [tokens, layers, top_k], with NO_ROUTE where a router
    chooses by itself; or record their own; or do neither."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def in_use() -> Request:
    """The request of the present block."""
    return _request.get()


def _forward(layer: int, plain: Any, experts: int, *inputs: Tensor) -> Any:
    request = _request.get()
    if isinstance(request, Tensor):
        with _Choice(request[:, layer], experts) as choice:
            outputs = plain(*inputs)
        assert choice.made, "the router chose its experts without torch.topk"
        return outputs
    outputs = plain(*inputs)
    if request is not None:
        request.note(layer, outputs[2], experts)
    return outputs


class _Choice(TorchFunctionMode):
    """Replaces the outcome of a top-k over all experts by the given ones [tokens, top_k]."""

    def __init__(self, given: Tensor, experts: int) -> None:
        super().__init__()
        self._given, self._experts = given, experts
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = func(*args, **(kwargs or {}))
        if func is not torch.topk or args[0].shape != (len(self._given), self._experts):
            return outcome
        self.made = True
        indices = torch.where(self._given == NO_ROUTE, outcome.indices, self._given)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

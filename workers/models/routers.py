"""Routers of a model with experts: they record the experts that they choose, and take given ones (router replay).

A router makes the weights of its experts by its own formula in both cases, because only its choice is replaced: the
outcome of its last top-k over the experts. A context variable holds what a pass asks for, as in workers.models.lora.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.domain.routes import dtype_of
from app.errors import UnservableModel
from app.settings import BaseModelSettings
from workers.models import base_model, target_modules

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
    """The experts that the routers chose in the latest pass.

    `given`: the experts that they take instead, int64 [tokens, layers, top_k], with NO_ROUTE where a router chooses by
    itself.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.given = given
        self._chosen: dict[int, Tensor] = {}
        self._experts = 0

    def note(self, layer: int, chosen: Tensor, experts: int) -> None:
        """Keeps a layer's choice [tokens, top_k] among `experts`."""
        self._chosen[layer], self._experts = chosen, experts

    def take(self, rows: int) -> np.ndarray:
        """Returns the routes of a pass over [rows, columns] tokens, [rows, columns, layers, top_k], in the dtype that
        app.domain.routes gives them."""
        routes: np.ndarray = self.chosen().cpu().numpy().astype(dtype_of(self._experts))
        return routes.reshape(rows, -1, *routes.shape[1:])

    def chosen(self) -> Tensor:
        """Returns the routes of a pass, int64 [tokens, layers, top_k]."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], 1)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The routes of a training pass.

    `given`: as in Recorder. `ops`: the number of each token's Op, int64 [tokens]. `load`: counts the tokens that each
    expert gets, fp32 [Ops, layers, experts].
    """

    given: Tensor | None
    ops: Tensor
    load: Tensor

    @contextmanager
    def used(self, rows: slice) -> Iterator[None]:
        """Routes these rows of the pass within the block, and counts them. Rows behind the last token are padding."""
        recorder, ops = Recorder(self._given(rows)), self.ops[rows]
        with use(recorder):
            yield
        chosen = recorder.chosen()[: len(ops)]
        layers = torch.arange(chosen.shape[1], device=chosen.device)[:, None]
        _, count, experts = self.load.shape
        places = ((ops[:, None, None] * count + layers) * experts + chosen).flatten()
        self.load.view(-1).index_add_(0, places, self.load.new_ones(()).expand(len(places)))

    def _given(self, rows: slice) -> Tensor | None:
        if self.given is None:
            return None
        given = self.given[rows]
        return nn.functional.pad(given, (0, 0) * 2 + (0, rows.stop - rows.start - len(given)), value=NO_ROUTE)


def load_metrics(load: Tensor) -> dict[str, float]:
    """Returns the metrics of an Op whose experts got these numbers of tokens, [layers, experts], under the SDK's names
    (tinker.types.ForwardBackwardOutput)."""
    shares = load.double() / load.double().mean(-1, keepdim=True)  # 1 is the perfect balance
    return {
        "e_frac_with_tokens:mean": (shares > 0).double().mean().item(),
        "e_frac_oversubscribed:mean": (shares > 1).double().mean().item(),
        "e_max_violation:mean": shares.amax(-1).mean().item() - 1,
        "e_max_violation:max": shares.amax().item() - 1,
        "e_min_violation:mean": shares.amin(-1).mean().item() - 1,
    }


_recorder: ContextVar[Recorder | None] = ContextVar("routes", default=None)


def found(model: nn.Module) -> list[Any]:
    """The routers, in the model's order."""
    return [module for module in model.modules() if type(module).__name__ in _ROUTERS]


def check_replayable(settings: BaseModelSettings) -> None:
    """Raises UnservableModel when not every layer with experts has a router of a known form; SetupError as
    `base_model.skeleton` does."""
    model = base_model.skeleton(settings)
    layers = {path.partition(".experts")[0] for path, _ in model.named_modules() if target_modules.trains_experts(path)}
    if not layers or len(found(model)) != len(layers):
        reason = "has routers of an unknown form" if layers else "has no experts"
        raise UnservableModel(
            f"base model {settings.name!r} ({model.config.architectures[0]}) {reason}, so router_replay cannot be on; "
            "turn it off"
        )


def wrap(model: nn.Module) -> tuple[int, int]:
    """Makes the model's routers obey `use`. Outside of its blocks they are unchanged, to the bit. Returns the number of
    routers, and of the experts of the one that has the most."""
    counts = []
    for layer, router in enumerate(found(model)):
        shape = getattr(router.weight, "ds_shape", router.weight.shape)  # ZeRO-3 empties it
        experts = shape[0] - getattr(router, "n_shared_experts", 0)  # Inkling scores shared ones too
        router.forward = partial(_forward, layer, router.forward, experts)
        counts.append(experts)
    return len(counts), max(counts, default=0)


@contextmanager
def use(recorder: Recorder | None) -> Iterator[None]:
    """Makes the passes within the block take the experts that `recorder` gives, and record all."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def in_use() -> Recorder | None:
    """The recorder of the present block."""
    return _recorder.get()


def _forward(layer: int, plain: Any, experts: int, *inputs: Tensor) -> Any:
    recorder = _recorder.get()
    if recorder is None:
        return plain(*inputs)
    if recorder.given is None:
        outputs = plain(*inputs)
    else:
        with _Choice(recorder.given[:, layer], experts) as choice:
            outputs = plain(*inputs)
        assert choice.made, "the router chose its experts without torch.topk"
    recorder.note(layer, outputs[2], experts)
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

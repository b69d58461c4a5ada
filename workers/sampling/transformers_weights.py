"""What a transformers sampler applies: any number of adapters to its base, or all weights of one model in its place."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from app.errors import ServerOpError
from workers import lora
from workers.base_model import LoadedBase
from workers.sampling import whole_weights
from workers.sampling.engine import Engine


class Weights(Protocol):
    """By the id that SamplerBackend.load was given."""

    def load(self, weights_id: str, folder: Path) -> None: ...

    def evict(self, weights_id: str) -> None: ...

    def find(self, weights_id: str | None) -> lora.Adapter | None:
        """The adapter to apply, if any. Raises ServerOpError for an id that is not loaded."""
        ...

    def ids(self) -> Sequence[str]: ...


class Adapters:
    """Any number, in the base's dtype."""

    def __init__(self, base: LoadedBase) -> None:
        self._base = base
        self._adapters: dict[str, lora.Adapter] = {}

    def load(self, weights_id: str, folder: Path) -> None:
        if weights_id in self._adapters:
            return
        adapter = lora.read_peft(folder)
        lora.check_fits(adapter, self._base.model)
        self._adapters[weights_id] = _cast(adapter, self._base.device, self._base.dtype)

    def evict(self, weights_id: str) -> None:
        self._adapters.pop(weights_id, None)

    def find(self, weights_id: str | None) -> lora.Adapter | None:
        adapter = self._adapters.get(weights_id) if weights_id is not None else None
        if weights_id is not None and adapter is None:
            raise ServerOpError(f"adapter {weights_id!r} is not loaded in this sampler")
        return adapter

    def ids(self) -> Sequence[str]:
        return sorted(self._adapters)


class WholeModel:
    """One at a time: another's weights are written over the present ones once nothing runs on those."""

    def __init__(self, base: LoadedBase, engine: Engine) -> None:
        self._model, self._engine = base.model, engine
        self._loading = threading.Lock()
        self._present: str | None = None

    def load(self, weights_id: str, folder: Path) -> None:
        with self._loading:
            if weights_id == self._present:
                return
            whole_weights.check_fits(folder, self._model)
            weights = whole_weights.weights_for(self._model, folder)
            self._present = None
            self._engine.when_idle(lambda: _write(self._model, weights))
            self._present = weights_id

    def evict(self, weights_id: str) -> None:
        """What is present keeps its memory: the next takes its place."""
        with self._loading:
            if weights_id == self._present:
                self._present = None

    def find(self, weights_id: str | None) -> lora.Adapter | None:
        if weights_id not in (None, self._present):
            raise ServerOpError(f"model {weights_id!r} is not loaded in this sampler")
        return None

    def ids(self) -> Sequence[str]:
        return [] if self._present is None else [self._present]


def _cast(adapter: lora.Adapter, device: torch.device, dtype: torch.dtype) -> lora.Adapter:
    """The adapter in the base's dtype: cast once here instead of in every step."""

    def cast(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to(device, dtype), requires_grad=False)

    pairs = {path: lora.LoraPair(cast(pair.a), cast(pair.b)) for path, pair in adapter.pairs.items()}
    return lora.Adapter(adapter.spec, pairs)


def _write(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].copy_(tensor)

"""Which models' states lie on the device: those used last. The others wait in host memory, and lose no bit by it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

_HOST = torch.device("cpu")


class Movable(Protocol):
    """A model's state."""

    def held(self) -> Iterator[Tensor]:
        """Every tensor of it: weights, optimizer, pending gradient."""
        ...


class Residency:
    """At most `most` models on `device` (0: all of them), or as many as one pass needs."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most = device, most
        self._here: OrderedDict[str, None] = OrderedDict()
        self._away: set[str] = set()

    def __len__(self) -> int:
        """How many are on the device."""
        return len(self._here)

    def bring(self, states: Mapping[str, Movable], wanted: Collection[str]) -> None:
        """Have these on the device, or room for them if they are yet to be made.

        Others leave first, the longest unused before the rest. What leaves or comes keeps its tensors' identity.
        """
        for model_id in wanted:
            self._here[model_id] = None
            self._here.move_to_end(model_id)
        if self._most:
            for model_id in list(self._here)[: -max(self._most, len(wanted))]:
                del self._here[model_id]
                if model_id in states:
                    _move(states[model_id], _HOST)
                    self._away.add(model_id)
        for model_id in self._away.intersection(wanted):
            _move(states[model_id], self._device)
            self._away.remove(model_id)

    def forget(self, model_id: str) -> None:
        """Its state is gone."""
        self._here.pop(model_id, None)
        self._away.discard(model_id)


def _move(state: Movable, device: torch.device) -> None:
    for tensor in state.held():
        tensor.data = tensor.data.to(device, copy=True)

"""Keeps the last used models on the device and the others in host memory; a move changes no bit."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping

import torch

from workers.backends.training.states.base import ModelState

log = logging.getLogger(__name__)
_HOST = torch.device("cpu")


class Residency:
    """Keeps at most `most` models on `device` (0: all that have room)."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most = device, most
        self._here: OrderedDict[str, None] = OrderedDict()
        self._away: set[str] = set()

    def __len__(self) -> int:
        """The number of models on the device."""
        return len(self._here)

    def bring(self, states: Mapping[str, ModelState], wanted: Collection[str]) -> None:
        """Brings the wanted models, at most `most`, to the device, or makes room for those that do not exist yet.

        Other models leave first, the least recently used before the rest. Moved tensors keep their identity.
        """
        for model_id in wanted:
            self._here[model_id] = None
            self._here.move_to_end(model_id)
        if self._most:
            self._leave(states, list(self._here)[: -self._most])
        for model_id in self._away.intersection(wanted):
            states[model_id].move(self._device)
            self._away.remove(model_id)

    def keep_only(self, states: Mapping[str, ModelState], wanted: Collection[str]) -> bool:
        """Moves all other models to host memory, since memory ran out. Returns False if there are none."""
        others = [model_id for model_id in self._here if model_id not in wanted]
        if others:
            log.warning(
                "memory ran out: %d idle models move to host memory; trainer.device_models bounds those that stay",
                len(others),
            )
        self._leave(states, others)
        return bool(others)

    def _leave(self, states: Mapping[str, ModelState], models: Collection[str]) -> None:
        for model_id in models:
            del self._here[model_id]
            if model_id in states:
                states[model_id].move(_HOST)
                self._away.add(model_id)

    def forget(self, model_id: str) -> None:
        """Forgets a model that no longer has a state."""
        self._here.pop(model_id, None)
        self._away.discard(model_id)

"""The states of a trainer's models, and the residency of those used last on the device.

Models that were not used last wait in host memory, and lose no bit by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.backends.training.base import OPTIMIZER_FILE, Create, Writer
from workers.models.lora import Adapter

_HOST = torch.device("cpu")


class ModelState(Protocol):
    """One model's weights, optimizer and pending gradient, and while a pass runs the gradient it has found so far.

    Every rank calls the same methods in the same order: `collect`, `sum_found`, `keep`, `step`, `capture` and
    `export` are collectives.
    """

    @property
    def adapter(self) -> Adapter | None:
        """What its tokens run under; None for the base as it is."""
        ...

    @property
    def critic(self) -> bool:
        """It has a value head in the place of the base's."""
        ...

    def held(self) -> Iterator[Tensor]:
        """Every tensor that may be moved, by its `data`, while no call is under way
        (workers/backends/training/state.py)."""
        ...

    def begin(self) -> None:
        """The next pass is over this model."""
        ...

    def collect(self) -> None:
        """Every rank is through with a round of micro-batches, backward too."""
        ...

    def sum_found(self) -> None:
        """The pass is over: sum up what the ranks have found."""
        ...

    def keep(self) -> None:
        """Add what was found to the pending gradient. Raises UserOpError, nothing added, when it is not finite."""
        ...

    def drop_found(self) -> None:
        """Forget what was found."""
        ...

    def drop_pending(self) -> None:
        """Forget the pending gradient."""
        ...

    def pending_gradients(self) -> Mapping[str, Tensor]:
        """fp32 by name, as far as this rank holds them; empty for zero."""
        ...

    def step(self, params: AdamParams) -> dict[str, float]:
        """AdamW on the pending gradient, which is then zero. Raises UserOpError, nothing changed.

        Returns grad_norm (L2, before clipping), learning_rate and param_norm (L2 of all that is trained, after it): the
        same bits on every rank.
        """
        ...

    def capture(self, *, optimizer: bool) -> Writer:
        """See TrainingBackend.capture; only rank 0's writes."""
        ...

    def export(self) -> Writer:
        """See TrainingBackend.export; only rank 0's writes."""
        ...

    def check_same_shape(self, other: ModelState) -> None:
        """Raises UserOpError unless `other` could take this one's place."""
        ...


class Models(Protocol):
    """Makes the states of one trainer's models."""

    @property
    def share_passes(self) -> bool:
        """Whether several of them may be in one pass."""
        ...

    def fresh(self, op: Create) -> ModelState:
        """Raises UserOpError for what this trainer does not train."""
        ...

    def read(self, folder: Path, *, optimizer: bool, critic: bool) -> ModelState:
        """From files `capture` wrote, on this rank. Raises UserOpError when they are missing, damaged or do not fit."""
        ...


def write_nothing(folder: Path) -> None:
    """The Writer of a rank that has nothing to write."""


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """Raises UserOpError when `folder` holds no readable optimizer state."""
    try:
        return dict(load_file(folder / OPTIMIZER_FILE))
    except (OSError, SafetensorError):
        raise UserOpError(f"checkpoint {folder.name} holds no optimizer state; load it without its optimizer") from None


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

"""The state of a trainer's models, and the residency of the last used ones on the device.

Other models wait in host memory; the move changes no bit.
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
    """One model's weights, optimizer and pending gradient; during a pass, also the gradient found so far.

    Every rank calls the same methods in the same order: `collect`, `sum_found`, `keep`, `step`, `capture` and
    `export` are collectives.
    """

    @property
    def adapter(self) -> Adapter | None:
        """The adapter its tokens run under; None for the plain base."""
        ...

    @property
    def critic(self) -> bool:
        """True if the model has a value head in the place of the base's head."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor of the state: weights, optimizer, pending gradient. Their `data` may move while no call
        runs."""
        ...

    def begin(self) -> None:
        """Prepares the engine for a pass over this model."""
        ...

    def collect(self) -> None:
        """Collects the gradients of a round of micro-batches. Every rank has finished the round, backward too."""
        ...

    def sum_found(self) -> None:
        """Sums the found gradient over the ranks at the end of a pass."""
        ...

    def keep(self) -> None:
        """Adds the found gradient to the pending gradient. Raises UserOpError, nothing added, when it is not finite."""
        ...

    def drop_found(self) -> None:
        """Drops the found gradient."""
        ...

    def drop_pending(self) -> None:
        """Drops the pending gradient."""
        ...

    def pending_gradients(self) -> Mapping[str, Tensor]:
        """Returns the pending gradient that this rank holds, fp32 by name; empty for zero."""
        ...

    def step(self, params: AdamParams) -> dict[str, float]:
        """Runs AdamW on the pending gradient, which is then zero. Raises UserOpError, nothing changed.

        Returns grad_norm (L2, before clipping), learning_rate and param_norm (L2 of all trained weights, after the
        step): the same bits on every rank.
        """
        ...

    def capture(self, *, optimizer: bool) -> Writer:
        """See TrainingBackend.capture. Only the Writer of rank 0 writes."""
        ...

    def export(self) -> Writer:
        """See TrainingBackend.export. Only the Writer of rank 0 writes."""
        ...

    def check_same_shape(self, other: ModelState) -> None:
        """Raises UserOpError unless `other` could take this one's place."""
        ...


class Models(Protocol):
    """Makes the states of one trainer's models."""

    @property
    def share_passes(self) -> bool:
        """True if several of these models may share a pass."""
        ...

    def fresh(self, op: Create) -> ModelState:
        """Makes a new model. Raises UserOpError for a kind of model that this trainer does not train."""
        ...

    def read(self, folder: Path, *, optimizer: bool, critic: bool) -> ModelState:
        """Reads files of `capture`, on this rank. Raises UserOpError when they are missing, damaged or do not fit."""
        ...


def write_nothing(folder: Path) -> None:
    """Writes nothing: the Writer of every rank but 0."""


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """Reads the optimizer state. Raises UserOpError when `folder` holds no readable one."""
    try:
        return dict(load_file(folder / OPTIMIZER_FILE))
    except (OSError, SafetensorError):
        raise UserOpError(f"checkpoint {folder.name} holds no optimizer state; load it without its optimizer") from None


class Residency:
    """Keeps at most `most` models on `device` (0: all of them), or as many as one pass needs."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most = device, most
        self._here: OrderedDict[str, None] = OrderedDict()
        self._away: set[str] = set()

    def __len__(self) -> int:
        """The number of models on the device."""
        return len(self._here)

    def bring(self, states: Mapping[str, ModelState], wanted: Collection[str]) -> None:
        """Brings the wanted models to the device, or makes room for those that do not exist yet.

        Other models leave first, the least recently used before the rest. Moved tensors keep their identity.
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
        """Forgets a model that no longer has a state."""
        self._here.pop(model_id, None)
        self._away.discard(model_id)


def _move(state: ModelState, device: torch.device) -> None:
    for tensor in state.tensors():
        tensor.data = tensor.data.to(device, copy=True)

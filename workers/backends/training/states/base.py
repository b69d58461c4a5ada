"""The protocols of a model's state and of what makes states, and readers of the files that all states have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.backends.training.base import GRADIENTS_FILE, OPTIMIZER_FILE, Create, Writer
from workers.backends.training.optimizer import Step
from workers.backends.training.ranks import Shards
from workers.models.adapter import Adapter


class ModelState(Protocol):
    """One model's weights, optimizer and pending gradient; during a pass, also the gradient found so far.

    Every rank calls the same methods in the same order: `begin`, `collect`, `sum_found`, `end_step`, `capture` and
    `export` are collectives.
    """

    shards: Shards
    pending_norm: Tensor | None
    """The L2 norm of the pending gradient, if it is known."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter its tokens run under; None for the plain base."""
        ...

    @property
    def critic(self) -> bool:
        """True if the model has a value head in the place of the base's head."""
        ...

    def move(self, device: torch.device) -> None:
        """Moves the state to `device`. Called while no call runs; tensors keep their identity."""
        ...

    def begin(self) -> None:
        """Prepares the engine for a pass over this model."""
        ...

    def collect(self) -> None:
        """Collects the gradients of a round of micro-batches. Called when this rank has finished the round, or, after
        `drop_found`, when its memory ran out."""
        ...

    def sum_found(self) -> None:
        """Sums the found gradient over the ranks at the end of a pass."""
        ...

    def found_gradients(self) -> Mapping[str, Tensor]:
        """Returns the found gradient that this rank holds, fp32 by name."""
        ...

    def keep(self, norm: Tensor) -> None:
        """Adds the found gradient to the pending gradient. `norm`: its L2 norm, which is finite."""
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

    def weights(self) -> Mapping[str, Tensor]:
        """Returns all trained weights by the names of `shards`; those of other ranks may be on the meta device."""
        ...

    def begin_step(self, params: AdamParams) -> Step:
        """Returns the step of AdamW on the pending gradient, and changes nothing."""
        ...

    def end_step(self) -> None:
        """Shows the stepped weights to passes and other ranks. The pending gradient is then zero."""
        ...

    def restore_pending(self, stored: Mapping[str, Tensor]) -> None:
        """Sets the pending gradient, from the tensors of GRADIENTS_FILE. Raises UserOpError when one is missing or
        misshapen."""
        ...

    def capture(self, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
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

    def fresh(self, op: Create) -> ModelState:
        """Makes a new model. Raises UserOpError for a kind of model that this trainer does not train."""
        ...

    def read(self, folder: Path, *, optimizer: bool, critic: bool) -> ModelState:
        """Reads files of `capture`, on this rank. Raises UserOpError when they are missing, damaged or do not fit."""
        ...


NO_FILES = Writer(lambda folder: None, 0)
"""The Writer of every rank but 0."""


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """Reads the optimizer state. Raises UserOpError when `folder` holds no readable one."""
    try:
        return dict(load_file(folder / OPTIMIZER_FILE))
    except (OSError, SafetensorError):
        raise UserOpError(f"checkpoint {folder.name} holds no optimizer state; load it without its optimizer") from None


def read_gradients(folder: Path) -> dict[str, Tensor]:
    """Reads the pending gradient of a snapshot; empty for zero. Raises UserOpError when it is not readable."""
    file = folder / GRADIENTS_FILE
    try:
        return dict(load_file(file)) if file.exists() else {}
    except (OSError, SafetensorError):
        raise UserOpError(f"the pending gradient in {folder.name} is not readable") from None


def shaped_as(stored: Mapping[str, Tensor], like: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the stored tensors of these names and shapes, on `device`. Raises UserOpError for any other."""
    try:
        return {name: stored[name].view(tensor.shape).to(device) for name, tensor in like.items()}
    except (KeyError, RuntimeError) as error:
        raise UserOpError(f"the pending gradient does not belong to this model: {error}") from None

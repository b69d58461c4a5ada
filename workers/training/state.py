"""One model's training state: adapter, optimizer, pending gradient; and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import get_total_norm

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers import lora
from workers.lora import Adapter
from workers.training.base import OPTIMIZER_FILE, Writer
from workers.training.optimizer import ShardedAdamW

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class AdapterState:
    """`pending`: fp32 sums of the gradients since the last step, in the order of `adapter.tensors()`; None for zero."""

    adapter: Adapter
    optimizer: ShardedAdamW
    pending: list[Tensor] | None = None

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        if self.pending is None:
            self.pending = list(gradients)
        else:
            torch._foreach_add_(self.pending, list(gradients))

    def step(self, params: AdamParams) -> dict[str, float]:
        """AdamW on the pending gradient, which is then zero. Raises UserOpError, nothing changed.

        Returns grad_norm (L2, before clipping), learning_rate and param_norm (L2 of the adapter after the step). Every
        rank holds all of the gradient and of the adapter, in one order, so each finds the same bits.
        """
        gradients = self.pending or [torch.zeros_like(p, requires_grad=False) for p in self._parameters()]
        norm = self.optimizer.step(gradients, params)
        self.pending = None
        return {
            "grad_norm": norm,
            "learning_rate": params.learning_rate,
            "param_norm": float(get_total_norm([p.detach() for p in self._parameters()])),
        }

    def capture(self, base_model_name: str, optimizer_state: Mapping[str, Tensor] | None) -> Writer:
        """Copies of the adapter and of `optimizer_state`, to be written as PEFT files and OPTIMIZER_FILE."""
        adapter = self.adapter.to(_CPU)
        moments = None if optimizer_state is None else {name: _copied(t) for name, t in optimizer_state.items()}

        def write(folder: Path) -> None:
            try:
                lora.write_peft(adapter, folder, base_model_name)
                if moments is not None:
                    save_file(moments, folder / OPTIMIZER_FILE)
            except SafetensorError as error:
                # What is left to go wrong is the disk: it is full, or the file too large for it.
                raise OSError(f"{folder.name} was not written: {error}") from error

        return write

    def check_same_shape(self, other: AdapterState) -> None:
        """Raises UserOpError unless `other` could take this one's place."""
        mine, theirs = ({n: tuple(p.shape) for n, p in s.adapter.tensors().items()} for s in (self, other))
        if mine != theirs:
            raise UserOpError(
                f"the checkpoint holds a rank {other.adapter.spec.rank} adapter on {len(other.adapter.pairs)} linears, "
                f"this model a rank {self.adapter.spec.rank} one on {len(self.adapter.pairs)}; "
                "create a new model from the checkpoint instead"
            )

    def _parameters(self) -> list[Tensor]:
        return list(self.adapter.tensors().values())


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """Raises UserOpError when `folder` holds no readable optimizer state."""
    try:
        return dict(load_file(folder / OPTIMIZER_FILE))
    except (OSError, SafetensorError):
        raise UserOpError(f"checkpoint {folder.name} holds no optimizer state; load it without its optimizer") from None


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to(_CPU, copy=True, memory_format=torch.contiguous_format)

"""The seam between what must be exact (journal, order, fences) and what computes.

The worker decides *which* Op runs; a backend only runs it. `apply` is the one way to change a model, so a live run, a
replay after a crash and a pass merged over several tenants are the same code. A backend does no Redis, no object
store and no seq bookkeeping; paths it is given are local folders. No torch type crosses this seam.

Every implementation passes tests/conformance/test_training_backend.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.domain.base_model import BaseModelInfo
from app.domain.ops import DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import Output
from app.errors import OpError

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class Create:
    """A fresh adapter from its spec, or from a folder that was captured into (then the spec is the checkpoint's).

    `lora` is None where the base's own weights are trained. A `critic` has a value head in the place of the base's.
    """

    lora: LoraSpec | None
    source: Path | None = None
    optimizer: bool = False
    critic: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Replace weights from a folder that was captured into; optimizer state too if `optimizer`, else it is reset.

    Pending gradients are dropped. A folder of another shape (rank, targets) is a UserOpError and changes nothing.
    """

    source: Path
    optimizer: bool


BackendOp = Create | Load | ForwardBackward | OptimStep | DropGradients

Writer = Callable[[Path], None]
"""Writes captured files into a folder, from any thread, whenever. Raises OSError when the disk does not take them."""


class TrainingBackend(Protocol):
    """One base model, and adapters beside it or models of all its weights, in one process or one rank group."""

    def open(self) -> BaseModelInfo:
        """Load the base. Called once, before anything else."""
        ...

    def apply(self, ops: Mapping[str, BackendOp]) -> Mapping[str, Output | OpError]:
        """Run at most one Op for each model id, all-or-nothing an Op: an OpError left that model untouched.

        Ops of different models may share a pass. With one Op in `ops` its bits depend on nothing but the Op and the
        model's own state. An exception other than a returned OpError means every state here is suspect.
        """
        ...

    def capture(self, model_id: str, *, optimizer: bool) -> Writer:
        """Copy the model as it is now, with `optimizer` its moments and step count too; later Ops do not change it.

        The files are an adapter as PEFT files (ADAPTER_FILE, ADAPTER_CONFIG_FILE), or all weights as a Hugging Face
        folder, and OPTIMIZER_FILE. Loading them with the optimizer gives the same bits. Pending gradients are not in
        them.
        """
        ...

    def export(self, model_id: str) -> Writer:
        """Copy the whole model as it is now, adapter merged into base, to be written as a Hugging Face folder.

        It has the base's dtype and loads without PEFT. Raises UserOpError for a critic, whose head no such model has.
        """
        ...

    def close(self, model_id: str) -> None:
        """Forget a model and free what it held; unknown ids are fine, and so is a backend that is not healthy."""
        ...

    def healthy(self) -> bool:
        """False once this process is of no further use: its ranks are out of step, a device is lost, or a call stands
        still. The worker then ends, to be started again. May be called from any thread."""
        ...

    def follow(self) -> None:
        """What every rank but the first does after `open`: take part in its calls until its `shutdown`."""
        ...

    def shutdown(self) -> None:
        """Let the other ranks go; nothing may be called afterwards. Never waits for a backend that is not healthy."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What really runs, as JSON: trainer class, ZeRO stage read from the engine, ranks, dtype, devices, models."""
        ...

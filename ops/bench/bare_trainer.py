"""Runs a training backend in this process, for the benchmark sides that need no service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from app.domain.ops import DropGradients, LoraSpec
from app.errors import OpError
from app.settings import BaseModelSettings
from ops.bench import timing
from workers.backends.training.backends import create
from workers.backends.training.base import BackendOp, Create, TrainingBackend


class BareTrainer:
    """Models `m0`, `m1`, ... of one rank on one base."""

    def __init__(self, settings: BaseModelSettings, models: int, rank: int) -> None:
        self._backend: TrainingBackend = create(settings)
        self._backend.open()
        for name in (f"m{i}" for i in range(models)):
            self.apply({name: Create(LoraSpec(rank))})

    def apply(self, *passes: Mapping[str, BackendOp]) -> None:
        """Runs the Ops one after another. Raises the first error of any Op."""
        for ops in passes:
            for outcome in self._backend.apply(ops).values():
                if isinstance(outcome, OpError):
                    raise outcome

    def save(self, name: str, folder: Path) -> None:
        """Saves a model's adapter in PEFT files."""
        self._backend.capture(name, optimizer=False)(folder)

    def timed_ms(self, *passes: Mapping[str, BackendOp]) -> float:
        """Returns the ms of the Ops. Each model's gradients start at zero, as after an optim_step."""
        for name in {name for ops in passes for name in ops}:
            self.apply({name: DropGradients()})
        return timing.timed_ms(lambda: self.apply(*passes))

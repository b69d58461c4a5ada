"""The plain-torch trainer: one process, no DeepSpeed. The others are measured against it."""

from __future__ import annotations

from app.errors import SetupError
from workers import base_model
from workers.training.devices import rank_device
from workers.training.engine import Engine, TorchEngine
from workers.training.ranks import RankGroup
from workers.training.trainer import Trainer
from workers.training.trunk import Trunk


class TorchBackend(Trainer):
    """A TrainingBackend in one process."""

    def start_engine(self) -> Engine:
        if self._settings.trainer.ranks > 1:
            raise SetupError("the torch trainer has one rank; set trainer.backend to deepspeed for more")
        base = base_model.load(self._settings, rank_device(self._settings.trainer))
        trained = self.prepare(base)
        trunk = Trunk(base.model, self._settings.trainer)
        return TorchEngine(base=base, trunk=trunk, ranks=RankGroup(), trained=trained)

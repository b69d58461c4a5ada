"""The training backends, plain torch and DeepSpeed, and `create`, which makes the one that the settings name.

Plain torch runs in one process; tests compare DeepSpeed with it.

The DeepSpeed trainer puts the base in a DeepSpeed engine at ZeRO stage 0 to 3, on one or more ranks.

Stage 3 splits the base over the ranks and gathers a layer while it is used. Stages 1 and 2 split optimizer state and
gradients. Here both belong to the models, which live outside the engine, so that many tenants of any LoRA rank can
share it. workers/backends/training/ranks.py splits the optimizer state from stage 1 on.
workers/backends/training/states/full.py splits the gradients of full fine-tuning from stage 2 on. Gradients of adapters
are small and are not split.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.errors import SetupError
from app.settings import BaseModelSettings, TrainerSettings
from app.settings.gpus import shown
from workers.backends.devices import check_gpus
from workers.backends.training import packing, sequence_parallel
from workers.backends.training.architectures import logit_rule
from workers.backends.training.engine import Engine, EngineLost, HiddenStates, TorchEngine, elements_held
from workers.backends.training.ranks import (
    COMPUTE_DEADLINE,
    RankGroup,
    default_environment,
    join_alone,
    joined,
    serve_hosts,
)
from workers.backends.training.sequence_parallel import ModelParallelGroup
from workers.backends.training.trainer import Trainer
from workers.models import base_model
from workers.models.base_model import LoadedBase
from workers.models.loading.sharded import Split
from workers.models.tensor_parallel import SplitLayers

_TENSOR_PARALLEL = "trainer.tensor_parallel"


def create(settings: BaseModelSettings, *, full: bool = False) -> Trainer:
    """Makes a TrainingBackend, not yet opened.

    With several ranks, rank 0 uses it and the others `open` and `follow` it. `full`: its models are fully fine-tuned.

    A launcher (torchrun) sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without one there is one rank.
    """
    if settings.trainer.backend == "torch":
        return TorchBackend(settings, full=full)
    return DeepSpeedBackend(settings, full=full)


class TorchBackend(Trainer):
    """A TrainingBackend in one process."""

    def start_engine(self) -> Engine:
        if self._settings.trainer.ranks > 1:
            raise SetupError("the torch trainer supports one rank only; set trainer.backend to deepspeed for more")
        _parallel_groups(RankGroup(), self._settings)  # refuses sequence_parallel and tensor_parallel
        base = base_model.load(self._settings, rank_device(self._settings.trainer))
        trained = self.prepare(base)
        hidden_states = HiddenStates(base.model, self._settings.trainer)
        return TorchEngine(base=base, hidden_states=hidden_states, ranks=RankGroup(), trained=trained)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepSpeedEngine(Engine):
    """The base inside `engine` (deepspeed.DeepSpeedEngine). The engine's hooks on it gather and release the base.

    The base is called directly: `engine(...)` would refuse a plain backward at stage 3.
    """

    engine: Any
    split_layers: SplitLayers | None = None

    def whole(self, name: str, weight: Tensor) -> Tensor:
        return weight if self.split_layers is None else self.split_layers.whole(name, weight)

    def gathered(self, parameter: Tensor) -> AbstractContextManager[None]:
        if self.engine.zero_optimization_stage() < 3:
            return nullcontext()
        return _deepspeed().zero.GatheredParameters([parameter])  # type: ignore[no-any-return]

    def write(self, parameter: nn.Parameter, value: Tensor | None, owner: int) -> None:
        if not hasattr(parameter, "ds_id"):  # stage 3 gives its parameters one; a critic's value head has none
            super().write(parameter, value, owner)
            return
        with _deepspeed().zero.GatheredParameters([parameter], modifier_rank=owner):
            if value is not None:
                parameter.data.copy_(value)

    def rest(self) -> None:
        if self.engine.zero_optimization_stage() < 3:
            return
        try:
            # The engine's own method of this name also collects garbage: 0.7 s of a pass over a tiny model.
            self.engine.optimizer.empty_partition_cache()
        except RuntimeError as error:  # a failed pass left weights half fetched
            raise EngineLost("DeepSpeed cannot release the weights of a failed pass") from error

    def describe(self) -> Mapping[str, Any]:
        return {
            "trainer": type(self.engine).__name__,
            "zero_stage": self.engine.zero_optimization_stage(),
            "base_elements_held": elements_held(self.engine.module),
        }


class DeepSpeedBackend(Trainer):
    """A TrainingBackend in one rank group. Without a launcher (torchrun), which sets RANK, WORLD_SIZE, ..., the group
    has one rank."""

    @default_environment()
    def start_engine(self) -> Engine:
        self._settings.check_tensor_parallel()
        trainer = self._settings.trainer
        device = rank_device(trainer)
        ranks = _join(trainer, device)
        sequence, split = _parallel_groups(ranks, self._settings)
        base = base_model.load(self._settings, device, _split(self._settings, device, split))
        trained = self.prepare(base)
        if split is not None:
            split.connect(base.model)
        collective_passes = (trainer.zero_stage == 3 and ranks.size > 1) or sequence.size > 1
        if collective_passes and not trained:
            # Else a pass over an adapter on the upper layers alone would gather fewer layers than another rank's, and
            # tokens without an adapter would send nothing back to the ranks that share their datum.
            base.model.enable_input_require_grads()
        hidden_states = HiddenStates(base.model, trainer, ranks.greatest if collective_passes else int, sequence, split)
        groups = None if split is None else DataParallelGroups.of(ranks, sequence)
        return DeepSpeedEngine(
            base=base,
            hidden_states=hidden_states,
            ranks=ranks,
            engine=_initialize(base, hidden_states, trainer, groups),
            split_layers=split,
            trained=trained,
            shards_optimizer=trainer.zero_stage > 0,
            shards_gradients=trainer.zero_stage > 1,
            collective_passes=collective_passes,
            sequence=sequence,
        )


def _join(trainer: TrainerSettings, device: torch.device) -> RankGroup:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if int(os.environ["WORLD_SIZE"]) != trainer.ranks:
        raise SetupError(f"trainer.ranks is {trainer.ranks}, but WORLD_SIZE is {os.environ['WORLD_SIZE']}")
    deepspeed = _deepspeed()
    backend = "gloo" if device.type == "cpu" else "nccl"
    # The stall detector ends the process first; see Trainer.healthy.
    deadline = max(COMPUTE_DEADLINE, timedelta(seconds=2 * trainer.rank_deadline_s))
    store = None
    if trainer.ranks > 1:
        store = serve_hosts()
    else:
        join_alone(backend, deadline)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=deadline, verbose=False)
    if trainer.ranks == 1:
        return RankGroup()
    return joined(store)


def _parallel_groups(ranks: RankGroup, settings: BaseModelSettings) -> tuple[ModelParallelGroup, SplitLayers | None]:
    """Makes the group of ranks that share micro-batches, and their layers where these are split. A collective."""
    trainer = settings.trainer
    if trainer.tensor_parallel == 1:
        return ModelParallelGroup.of(ranks, trainer.sequence_parallel), None
    group = ModelParallelGroup.of(ranks, trainer.tensor_parallel, _TENSOR_PARALLEL)
    return group, split_layers(settings, group)


def split_layers(settings: BaseModelSettings, group: ModelParallelGroup) -> SplitLayers:
    """Makes the layers of a base that a group of ranks splits. Raises SetupError where they cannot."""
    model = base_model.skeleton(settings)
    packed = logit_rule(model) is not None
    sequence_parallel.check(model, group.size, packed=packed, setting=_TENSOR_PARALLEL, one_for_several=True)
    return SplitLayers(model, group.rank, group.size, group.group)


@dataclass(frozen=True, slots=True)
class DataParallelGroups:
    """The ranks with the same part of split layers as this one, in the form that DeepSpeed takes (Megatron's "mpu").

    Without it, DeepSpeed would broadcast rank 0's part of each weight to all ranks.
    """

    ranks: RankGroup
    sharing: ModelParallelGroup
    group: Any

    @classmethod
    def of(cls, ranks: RankGroup, sharing: ModelParallelGroup) -> DataParallelGroups:
        """Makes the groups. A collective."""
        groups = [dist.new_group(list(range(part, ranks.size, sharing.size))) for part in range(sharing.size)]
        return cls(ranks, sharing, groups[sharing.rank])

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_rank(self) -> int:
        return self.ranks.rank // self.sharing.size

    def get_data_parallel_world_size(self) -> int:
        return self.ranks.size // self.sharing.size

    def get_model_parallel_group(self) -> Any:
        return self.sharing.group

    def get_model_parallel_rank(self) -> int:
        return self.sharing.rank

    def get_model_parallel_world_size(self) -> int:
        return self.sharing.size


def _config(trainer: TrainerSettings, dtype: torch.dtype) -> dict[str, Any]:
    """Returns DeepSpeed's own configuration of the engine."""
    zero: dict[str, Any] = {"stage": trainer.zero_stage}
    if trainer.offload and trainer.zero_stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "zero_allow_untested_optimizer": True,
    }


def _split(settings: BaseModelSettings, device: torch.device, layers: SplitLayers | None) -> Split | None:
    """Returns what splits a parameter over the ranks: as `layers` say, and at stage 3 as the engine would.

    No rank waits for another one in it: each has read the parameter. DeepSpeed itself would send rank 0's to all.
    """
    if layers is not None:
        return lambda name, parameter: layers.split(name, parameter)  # transformers copies an object, with its group
    if settings.trainer.zero_stage < 3:
        return None
    config = _config(settings.trainer, base_model.choose_dtype(settings.dtype, device))
    init = _deepspeed().zero.Init(module=nn.Module(), config_dict_or_path=config)

    def split(_: str, parameter: Any) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return split


def _initialize(
    base: LoadedBase, hidden_states: HiddenStates, trainer: TrainerSettings, groups: DataParallelGroups | None
) -> Any:
    """Puts the base in a DeepSpeed engine, with fp32 tensors still in fp32: the bf16 mode would round RoPE's angles and
    the weights that transformers keeps in fp32.

    At stage 3 it splits the parameters that are still whole.
    """
    buffers = {name: buffer.clone() for name, buffer in base.model.named_buffers() if buffer.is_floating_point()}
    wider = {p: p.data for p in base.model.parameters() if p.dtype.itemsize > base.dtype.itemsize}
    config = _config(trainer, base.dtype)
    optimizer = _placeholder(hidden_states, base) if trainer.zero_stage in (1, 2) else None
    for layer in packing.datum_by_datum(base.model):
        # It runs once for each length of its datums. Stage 3 must gather it once, since ranks have different lengths.
        _deepspeed().utils.set_z3_leaf_module(layer, True)
    with redirect_stdout(StringIO()):  # DeepSpeed prints memory reports and build notes at any log level
        engine, *_ = _deepspeed().initialize(model=hidden_states, config=config, optimizer=optimizer, mpu=groups)
    for name, buffer in base.model.named_buffers():
        buffer.data = buffers.get(name, buffer.data)
    for parameter, data in wider.items():
        parameter.data = data
    return engine


def _placeholder(hidden_states: HiddenStates, base: LoadedBase) -> torch.optim.Optimizer:
    """Makes an optimizer of one element, never stepped: DeepSpeed refuses to start stages 1 and 2 without one."""
    parameter = nn.Parameter(torch.zeros(1, dtype=base.dtype, device=base.device))
    hidden_states.register_parameter("zero_placeholder", parameter)  # the base's own parameters stay the base's
    return torch.optim.AdamW([parameter])


def _deepspeed() -> Any:
    """Imports DeepSpeed once DS_ACCELERATOR is set. Keeps its reports of every setting and buffer out of the log."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # Nothing here calls DeepSpeed's shared-memory all-reduce. It is compiled at first use (33 s), under a lock file
    # that a killed process leaves behind: every later start would then wait for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def rank_device(settings: TrainerSettings) -> torch.device:
    """Returns the GPU with the number LOCAL_RANK among those that this process sees, or the CPU without a GPU.

    They are those of `devices` if any are named (workers/cli.py). From then on torch takes no more than the settings'
    share of its memory. Raises SetupError when it does not exist, or torch cannot use it.
    """
    check_gpus()
    if not torch.cuda.is_available():
        if settings.devices:
            raise SetupError(
                f"trainer.devices is {shown(settings.devices)}, but torch sees no GPU here; correct the list, or set "
                "CUDA_VISIBLE_DEVICES to '' and leave it out to use the CPU"
            )
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    seen = torch.cuda.device_count()
    if local_rank >= seen:
        named = f"trainer.devices is {shown(settings.devices)}, but " if settings.devices else ""
        raise SetupError(
            f"rank {local_rank} has no GPU: {named}torch sees {seen} here; lower trainer.ranks or name GPUs that exist"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(settings.memory_share, device)
    return device

"""The choice of what autograd keeps of a pass: made from the number of its tokens and the memory that is free.

A layer keeps all of its activations, or its input alone and computes the rest again in the backward pass, or its input
in host memory. The same operations run in each case, so on a CPU the results have the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_layers import GradientCheckpointingLayer

from app.errors import SetupError
from workers.models import lora, routers

# Tokens of the two passes that measure. Their difference cancels what does not grow with the tokens, such as weights.
_PROBES = (64, 128)
# The rest is for the head's chunk, gradients, and what the two small passes cannot show.
_USABLE = 0.6
# Tokens of a micro-batch. A GPU is busy from some 2,000 on: layers are computed again rather than run on fewer.
LEAST_TOKENS, _BUSY, _MOST = 1024, 2048, 8192
_CGROUP = Path("/sys/fs/cgroup")


class Kept(IntEnum):
    """The tensors that a layer keeps for its backward pass, from the most memory to the least."""

    ALL = 0
    INPUTS = 1
    INPUTS_ON_HOST = 2


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one token: `whole`, the activations of all layers; `inputs`, the inputs of all layers; `layers`: their
    number."""

    whole: float
    inputs: float
    layers: int


def choose(tokens: int, footprint: Footprint, free: int, *, host: bool) -> Kept:
    """Returns the choice that fits in `free` bytes and computes least. `host`: inputs can move to other memory."""
    usable = free * _USABLE
    if tokens * footprint.whole <= usable:
        return Kept.ALL
    one_layer = footprint.whole / footprint.layers
    if not host or tokens * (footprint.inputs + one_layer) <= usable:
        return Kept.INPUTS
    return Kept.INPUTS_ON_HOST


def micro_batch_tokens(footprint: Footprint, free: int, setting: bool | Literal["auto"]) -> int:
    """Returns the tokens of a GPU's micro-batch: a multiple of 1,024 up to 8,192, as many as fit in `free` bytes.

    `setting`: trainer.activation_checkpointing. With "auto" all activations are kept where 2,048 tokens fit so.
    """
    usable = free * _USABLE
    whole = usable / max(footprint.whole, 1)
    again = usable / (footprint.inputs + footprint.whole / footprint.layers)
    fitting = again if setting is True or (setting == "auto" and whole < _BUSY) else whole
    return int(min(max(fitting // LEAST_TOKENS * LEAST_TOKENS, LEAST_TOKENS), _MOST))


class Activations:
    """Applies the choice to a model's layers, pass by pass."""

    def __init__(self, model: Any, setting: bool | Literal["auto"], agreed: Callable[[int], int] = int) -> None:
        """`setting`: trainer.activation_checkpointing. `agreed` returns the greatest choice of the ranks that run the
        same layers together.

        Raises SetupError when the setting is true and the model has no layers made for it.
        """
        self._layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if setting is True and not self._layers:
            raise SetupError(f"{type(model).__name__} does not support trainer.activation_checkpointing; turn it off")
        for layer in self._layers:  # some families' layers call dropout themselves, by their own train mode
            for name in ("dropout", "activation_dropout"):
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)
        self._config, self._setting, self._agreed = model.config.get_text_config(), setting, agreed
        self._footprint: Footprint | None = None
        self._set(setting is True)

    def during(self, tokens: int, device: torch.device, run: Callable[[int], object]) -> AbstractContextManager[object]:
        """Returns the context for a forward of so many tokens. `run` makes a forward of as many as it is given.

        A collective where the ranks must agree.
        """
        if self._setting != "auto" or not self._layers or not torch.is_grad_enabled():
            return nullcontext()
        found = choose(tokens, self._footprint_by(run), free_memory(device), host=device.type != "cpu")
        choice = self._agreed(found)
        self._set(choice != Kept.ALL)
        return (
            torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
            if choice == Kept.INPUTS_ON_HOST
            else nullcontext()
        )

    def micro_batch_tokens(self, device: torch.device, run: Callable[[int], object]) -> int:
        """Returns the tokens of a micro-batch by the memory that is free now; 1,024 on a CPU, so that a result's bits
        depend on no memory. `run` as in `during`."""
        if device.type == "cpu" or not self._layers:
            return LEAST_TOKENS
        return micro_batch_tokens(self._footprint_by(run), free_memory(device), self._setting)

    def _footprint_by(self, run: Callable[[int], object]) -> Footprint:
        if self._footprint is None:
            self._footprint = self._measured(run)
        return self._footprint

    def _measured(self, run: Callable[[int], object]) -> Footprint:
        self._set(False)
        kept = []
        for count in _PROBES:
            with _kept_bytes() as found:
                run(count)
            kept.append(sum(found.values()))
        self._set(self._setting is True)
        few, many = _PROBES
        layers = len(self._layers)
        whole = max(0, kept[1] - kept[0]) / (many - few)
        return Footprint(whole, self._config.hidden_size * self._config.dtype.itemsize * layers, layers)

    def _set(self, again: bool) -> None:
        """Only the layers themselves go to train mode, not their submodules: there is no dropout here."""
        for layer in self._layers:
            layer.training, layer.gradient_checkpointing = again, again
            layer._gradient_checkpointing_func = _recomputed


def _contexts() -> tuple[Any, Any]:
    """Returns the contexts of forward and recomputation. The second is needed because the autograd thread of a GPU has
    context variables of its own.
    """
    return nullcontext(), _as_in(lora.in_use(), routers.in_use())


@contextmanager
def _as_in(adapters: lora.Segments, routes: routers.Request) -> Iterator[None]:
    with lora.use(adapters), routers.use(routes):
        yield


_recomputed = partial(
    torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=_contexts, preserve_rng_state=False
)


@contextmanager
def _kept_bytes() -> Iterator[dict[int, int]]:
    """Yields the bytes of each storage that autograd would keep of the block's forward, by the storage's id.

    Nothing is kept: ZeRO-3 could not free a gathered weight that is, and the base would be whole on each rank.
    """
    found: dict[int, int] = {}
    seen = []  # with a weak reference, no other storage gets the id within the block

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        seen.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        found[seen[-1].cdata] = storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        yield found


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this rank may still take on `device`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        share = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_allocated(device)
        return int(min(free + cached, share))
    available = int(_field(Path("/proc/meminfo"), "MemAvailable")) * 1024
    return min(available, _left_in_cgroup(available)) // _ranks_here()


def _ranks_here() -> int:
    """Returns the number of ranks on this machine, as torchrun or DeepSpeed's launcher says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def _left_in_cgroup(otherwise: int) -> int:
    """Returns the bytes below the container's limit (cgroup v2)."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return limit - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return otherwise


def _field(file: Path, name: str) -> str:
    return next(line.split()[1] for line in file.read_text().splitlines() if line.startswith(f"{name}:"))

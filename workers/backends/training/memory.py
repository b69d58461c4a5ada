"""Chooses the activations that autograd keeps of a pass, by the number of its tokens and the free memory.

A layer keeps all of its activations, or its input alone and computes the rest again in the backward pass. Only as many
layers are computed again as do not fit. If all are and their inputs do not fit, these lie in host memory. The same
operations run in each case, so on a CPU the results have the same bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_layers import GradientCheckpointingLayer

from app.errors import SetupError
from app.settings import TrainerSettings
from app.stack.memory import free_bytes
from workers.backends.training.lm_head import chunk_sizes
from workers.backends.training.ranks import assigned
from workers.models import lora, routers
from workers.models.adapter import Segments

log = logging.getLogger(__name__)
# Tokens of the two passes that measure. Their difference cancels what does not grow with the tokens, such as weights.
_PROBES = (64, 128)
# The part of the free memory that activations may take. On a GPU the head's part is taken off first, and the rest is
# for gradients, for the temporaries of a layer's backward pass and for fragments.
USABLE_ON_GPU = 0.8
# On a CPU other processes take memory too, and a base that is trained has gradients of its own size.
_USABLE = 0.6
# Tokens of a micro-batch. A GPU is busy from some 2,000 on: layers are computed again rather than run on fewer.
LEAST_TOKENS, _BUSY, _MOST = 1024, 2048, 8192
# Models narrower than this have more tokens, as their kernels are shorter. With 8,192 tokens at once Qwen3-0.6B (width
# 1,024) took 1.0 s for 32,768 tokens in datums of 2,048 on an H200, all of it the host's time to launch kernels.
_WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one token: `whole`, all activations; `layers`, those of each layer, in the order in which they run;
    `input`, a layer's input."""

    whole: float
    layers: Sequence[float]
    input: float

    def peak(self, again: int) -> float:
        """Returns the bytes of one token in a pass that computes the first `again` layers again.

        The first ones, because the backward pass reaches them last. By then it has freed the activations of the later
        layers, and a layer that is computed again reuses that memory. The last layers would need theirs on top of all
        that is still kept.
        Unless `again` is 0, one layer is counted on top: it is needed if all are computed again, and is else a margin.
        """
        if not again:
            return self.whole
        return self.whole - sum(self.layers[:again]) + again * self.input + max(self.layers)


def choose(tokens: int, footprint: Footprint, usable: float, *, host: bool) -> int:
    """Returns the least number of layers to compute again so that a pass fits in `usable` bytes, or else all layers.

    `host`: inputs can move to other memory. If not even all layers fit then, returns one more than there are: all are
    computed again, and their inputs move.
    """
    layers = len(footprint.layers)
    fitting = (again for again in range(layers + 1) if tokens * footprint.peak(again) <= usable)
    return next(fitting, layers + 1 if host else layers)


def most_tokens(width: int, *, packed: bool) -> int:
    """Returns the most tokens of a GPU's micro-batch for a model of this hidden size: 8,192 to 32,768.

    Without packing 8,192: such a model makes all logits at once, which no estimate here counts.
    """
    return _MOST * min(max(1, _WIDTH // width), 4) if packed else _MOST


def micro_batch_tokens(footprint: Footprint, usable: float, setting: bool | Literal["auto"], most: int) -> int:
    """Returns the tokens of a GPU's micro-batch: a multiple of 1,024 up to `most`, as many as fit in `usable` bytes.

    `setting`: trainer.activation_checkpointing. With "auto" all activations are kept where 2,048 tokens fit so, and
    else no layer's.
    """
    kept = usable / max(footprint.peak(0), 1)
    computed_again = usable / max(footprint.peak(len(footprint.layers)), 1)
    fitting = computed_again if setting is True or (setting == "auto" and kept < _BUSY) else kept
    return int(min(max(fitting // LEAST_TOKENS * LEAST_TOKENS, LEAST_TOKENS), most))


def warn_if_short(model: Any, trainer: TrainerSettings, device: torch.device) -> None:
    """Logs a warning if full fine-tuning of `model` takes more than a GPU's free memory."""
    needed = bytes_of_trained(model, trainer)
    if device.type != "cpu" and needed > (free := free_memory(device)):
        log.warning(
            "full fine-tuning of this base takes %.0f GB on each GPU beside the weights, and %.0f GB are free: set "
            "trainer.ranks and trainer.zero_stage higher, or trainer.offload",
            needed / 1e9,
            free / 1e9,
        )


def bytes_of_trained(model: Any, trainer: TrainerSettings) -> int:
    """Returns the bytes that full fine-tuning of `model` takes on the device of the fullest rank, beside its weights,
    at the peak of a pass (the table of docs/decisions/0009-full-fine-tuning.md)."""
    sizes = {id(weight): _numel(weight) for weight in model.parameters()}
    itemsize: int = max(model.parameters(), key=_numel).element_size()  # some small weights may stay in fp32
    elements, stage = sum(sizes.values()), trainer.zero_stage if trainer.ranks > 1 else 0
    kept = elements
    if stage > 0:
        owners = assigned(sizes, trainer.ranks)
        kept = max(sum(sizes[one] for one in sizes if owners[one] == rank) for rank in range(trainer.ranks))
    # Masters and AdamW's moments: 12 bytes an element; the gradients of the pass and of those before the step: 8.
    state = 20 * kept + (4 * elements if stage == 1 else 0)  # at stage 1 a rank's own sum is whole until it is sent
    if stage > 1:
        own = _largest_in_backward(model, sizes) * (itemsize + 4)  # the ranks sum it in fp32
    else:
        head = model.get_output_embeddings()  # its gradient is in fp32
        own = elements * itemsize + (0 if head is None else (4 - itemsize) * _numel(head.weight))
    return own if trainer.offload else own + state


def _largest_in_backward(model: nn.Module, sizes: Mapping[int, int]) -> int:
    """The elements whose gradients wait for their owners at once: those of one layer, and of no layer."""
    by_layer = [{id(weight) for weight in layer.parameters()} for layer in checkpointable_layers(model)]
    outside = sizes.keys() - set().union(*by_layer)
    return sum(sizes[one] for one in outside) + max((sum(sizes[one] for one in own) for own in by_layer), default=0)


def _numel(weight: Tensor) -> int:
    """The elements of a weight. ZeRO-3 empties it and keeps a record."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def checkpointable_layers(model: nn.Module) -> list[Any]:
    """Returns the layers that transformers can checkpoint, in the model's order; they may be nested."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


class Activations:
    """Applies the choice to a model's layers, pass by pass."""

    def __init__(self, model: Any, setting: bool | Literal["auto"], agreed: Callable[[int], int] = int) -> None:
        """`setting`: trainer.activation_checkpointing. `agreed` returns the greatest choice (see `choose`) of the
        ranks that run the same layers together.

        Raises SetupError when the setting is true and the model has no layers made for it.
        """
        self._layers = checkpointable_layers(model)
        if setting is True and not self._layers:
            raise SetupError(f"{type(model).__name__} does not support trainer.activation_checkpointing; turn it off")
        for layer in self._layers:  # some families' layers call dropout themselves, by their own train mode
            for name in ("dropout", "activation_dropout"):
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)
        self._model, self._setting, self._agreed = model, setting, agreed
        self._footprint: Footprint | None = None
        self._set(self._always)

    def during(self, tokens: int, device: torch.device, run: Callable[[int], object]) -> AbstractContextManager[object]:
        """Returns the context for a forward of `tokens` tokens. `run` makes a forward of as many as it is given.

        A collective where the ranks must agree.
        """
        if self._setting != "auto" or not self._layers or not torch.is_grad_enabled():
            return nullcontext()
        footprint = self._footprint_by(run)
        choice = self._agreed(choose(tokens, footprint, self._usable(tokens, device), host=device.type != "cpu"))
        self._set(min(choice, len(footprint.layers)))
        return (
            torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
            if choice > len(footprint.layers)
            else nullcontext()
        )

    def micro_batch_tokens(
        self, device: torch.device, run: Callable[[int], object], *, packed: bool, reserved: int = 0
    ) -> int:
        """Returns the tokens of a micro-batch by the memory that is free now, less the `reserved` bytes that will be
        taken; 1,024 on a CPU, so that a result's bits depend on no memory. `run` as in `during`."""
        if device.type == "cpu" or not self._layers:
            return LEAST_TOKENS
        most = most_tokens(self._model.config.get_text_config().hidden_size, packed=packed)
        usable = self._usable(most, device, reserved)
        return micro_batch_tokens(self._footprint_by(run), usable, self._setting, most)

    def _usable(self, tokens: int, device: torch.device, reserved: int = 0) -> float:
        """Returns the bytes of `device` that the activations of `tokens` tokens may take, if `reserved` are taken."""
        free = free_memory(device) - reserved
        if device.type == "cpu":
            return free * _USABLE
        config = self._model.config.get_text_config()
        head = chunk_sizes(device).bytes(tokens * config.vocab_size, config.dtype.itemsize)
        trained = any(weight.requires_grad for weight in self._model.parameters())
        return (free - head) * (_USABLE if trained else USABLE_ON_GPU)

    def _footprint_by(self, run: Callable[[int], object]) -> Footprint:
        if self._footprint is None:
            self._footprint = self._measured(run)
        return self._footprint

    def _measured(self, run: Callable[[int], object]) -> Footprint:
        """Also puts the layers in the order in which they run. Those that see no text, as in a vision tower, are last
        and not counted: they are frozen and keep nothing."""
        self._set(0)
        passes = []
        for count in _PROBES:
            with _kept_bytes() as found, _by_layer(self._layers, found) as shares:
                run(count)
            passes.append((sum(found.values()), shares))
        (fewer, few), (more, many) = passes
        self._layers = [*many, *(layer for layer in self._layers if layer not in many)]
        self._set(self._always)
        tokens = _PROBES[1] - _PROBES[0]
        layers = [max(0, many[layer] - few[layer]) / tokens for layer in many]
        config = self._model.config.get_text_config()
        return Footprint(max(0, more - fewer) / tokens, layers, config.hidden_size * config.dtype.itemsize)

    @property
    def _always(self) -> int:
        """The layers that are computed again in every pass."""
        return len(self._layers) if self._setting is True else 0

    def _set(self, count: int) -> None:
        """The first `count` layers are computed again. Only the layers themselves go to train mode, not their
        submodules: there is no dropout here."""
        for place, layer in enumerate(self._layers):
            layer.training = layer.gradient_checkpointing = place < count
            layer._gradient_checkpointing_func = _recomputed


def _contexts() -> tuple[Any, Any]:
    """Returns the contexts of forward and recomputation. The second is needed because the autograd thread of a GPU has
    context variables of its own.
    """
    return nullcontext(), _as_in(lora.in_use(), routers.in_use())


@contextmanager
def _as_in(adapters: Segments, recorder: routers.Recorder | None) -> Iterator[None]:
    with lora.use(adapters), routers.use(recorder):
        yield


class _FirstOfBackward(torch.autograd.Function):
    """Returns a layer's outputs. Its node runs first in the layer's backward pass and reads a saved tensor, which
    starts the recomputation of the layer.

    So every rank recomputes the layer at the same point. Without it, the first node that reads a saved tensor starts
    the recomputation, and which node that is depends on the adapters of the rank. At ZeRO-3 the ranks would then gather
    weights in different orders, and each would receive the other's.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Any) -> Any:
        ctx.save_for_backward(torch.empty(0))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ = ctx.saved_tensors
        return gradients


def _recomputed(run: Callable[..., Any], *given: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(
        partial(_with_first, run), *given, use_reentrant=False, context_fn=_contexts, preserve_rng_state=False
    )


def _with_first(run: Callable[..., Any], *given: Any) -> Any:
    outputs = run(*given)
    if isinstance(outputs, tuple):
        return _FirstOfBackward.apply(*outputs)  # type: ignore[no-untyped-call]
    return _FirstOfBackward.apply(outputs)[0]  # type: ignore[no-untyped-call]


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


@contextmanager
def _by_layer(layers: Sequence[Any], found: Mapping[int, int]) -> Iterator[dict[Any, int]]:
    """Yields the bytes that each layer of the block's forward adds to `found`, in the order in which they run."""
    shares: dict[Any, int] = {}
    counted = 0

    def enter(*_: object) -> None:
        nonlocal counted
        counted = sum(found.values())

    def leave(layer: Any, *_: object) -> None:
        shares[layer] = shares.get(layer, 0) + sum(found.values()) - counted
        enter()

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield shares
    finally:
        for hook in hooks:
            hook.remove()


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this rank may still take on `device`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        share = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_allocated(device)
        return int(min(free + cached, share))
    return free_bytes(psutil.virtual_memory().available) // _ranks_here()


def _ranks_here() -> int:
    """Returns the number of ranks on this machine, as torchrun or DeepSpeed's launcher says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)

"""State of fully fine-tuned models: fp32 masters outside the engine, whose parameters are a copy of them.

The optimizer treats such a model as an adapter whose tensors are the base's own. The page
docs/decisions/0009-full-fine-tuning.md says which part each rank holds, and why DeepSpeed's optimizers hold none.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from app.domain.ops import AdamParams, LoraSpec
from app.errors import UserOpError
from workers.backends.devices import copied
from workers.backends.training.base import GRADIENTS_FILE, OPTIMIZER_FILE, Create, Writer
from workers.backends.training.engine import Engine
from workers.backends.training.optimizer import ShardedAdamW, Step
from workers.backends.training.ranks import Shards
from workers.backends.training.states.base import NO_FILES, ModelState, read_optimizer, shaped_as
from workers.models import base_model, lora
from workers.models.adapter import Adapter
from workers.models.full_weights import check_config, huggingface_writer

# The name that transformers' sequence classifiers use.
VALUE_HEAD = "score.weight"


class ComputeCopy:
    """The engine's parameters: a copy of one model's masters at a time, cast to the base's dtype."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of: object = None

    def shows(self, state: FullFinetuneState) -> bool:
        return self._of is state.identity

    def show(self, state: FullFinetuneState) -> None:
        """Copies the masters of `state`, unless the engine holds them already."""
        if not self.shows(state):
            self.refresh(state)

    def refresh(self, state: FullFinetuneState) -> None:
        """Copies the changed masters of `state`. Every rank gets the owners' values, tensor by tensor."""
        self._of = None  # what is copied in part is nobody's
        for name, parameter in state.copies.items():
            mine = state.masters[name].detach() if state.shards.owns(name) else None
            self._engine.write(parameter, mine, state.shards.owners[name])
        self._of = state.identity


class FullFinetuneState:
    """A ModelState of all weights.

    Masters, moments and gradients lie on one device: the engine's, or the CPU if offloaded.

    The optimizer's state and the masters are split as `shards` says. The gradient of a pass is split too once it is
    summed. Until then every rank sums up its own gradient. If the engine's ranks shard gradients, a layer's gradient
    goes to its owners as soon as the backward pass has left the layer, and all others at the end of the round.
    """

    def __init__(
        self, engine: Engine, copy: ComputeCopy, form: Any, masters: Mapping[str, nn.Parameter], shards: Shards
    ) -> None:
        """`form`: a transformers model of the class that is saved; its values are not read (see huggingface_writer)."""
        self.masters, self.shards = masters, shards
        self.adapter = _value_head(masters[VALUE_HEAD].shape, engine.base.device) if VALUE_HEAD in masters else None
        self.copies = {name: self._copy_of(name, engine) for name in masters}
        self.optimizer = ShardedAdamW(masters, shards)
        self.identity = object()  # ComputeCopy keeps this, and not the state, so that a closed model is freed
        self._engine, self._copy, self._form = engine, copy, form
        self._master_device = next((masters[name].device for name in shards.mine()), engine.base.device)
        self._order = _last_layer_first(engine.hidden_states.layers, self.copies)
        self._unsummed = deque(self._order)
        self._finished_layers: set[nn.Module] = set()
        self._found: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] | None = None
        self.pending_norm: Tensor | None = None

    @property
    def critic(self) -> bool:
        return self.adapter is not None

    def move(self, device: torch.device) -> None:
        """Does nothing: this model is alone on its trainer, and `trainer.offload` keeps it in host memory."""
        return

    def begin(self) -> None:
        self._copy.show(self)
        self._engine.hidden_states.on_layer_gradients = self._on_layer_gradients if self._sums_by_layer else None

    def collect(self) -> None:
        if self._sums_by_layer:
            while self._unsummed:
                self._sum_next()
            if any(parameter.grad is not None for parameter in self.copies.values()):
                raise RuntimeError("a weight had no gradient yet when a pass left its layer: use trainer.zero_stage 1")
            self._unsummed = deque(self._order)
            self._finished_layers.clear()
            return
        for name, parameter in self.copies.items():
            gradient = self._engine.take_gradient(parameter)
            if gradient is not None:
                self._add(name, gradient)

    def sum_found(self) -> None:
        if not self._sums_by_layer:
            mine, self._found = self._found, {}
            for name in self.masters:
                self._sum(name, self._summable(name, mine.get(name)))

    def found_gradients(self) -> Mapping[str, Tensor]:
        return self._found

    def keep(self, norm: Tensor) -> None:
        if self._pending is None:
            self._pending, self.pending_norm = self._found, norm
        else:
            torch._foreach_add_([*self._pending.values()], [self._found[name] for name in self._pending])
            self.pending_norm = None
        self._found = {}

    def drop_found(self) -> None:
        self._engine.hidden_states.on_layer_gradients = None  # it would keep a closed model in memory
        for parameter in self.copies.values():
            self._engine.take_gradient(parameter)
        self._found = {}

    def drop_pending(self) -> None:
        self._pending = self.pending_norm = None

    def pending_gradients(self) -> Mapping[str, Tensor]:
        return self._pending or {}

    def restore_pending(self, stored: Mapping[str, Tensor]) -> None:
        mine = {name: self.masters[name] for name in self.shards.mine()}
        self._pending = shaped_as(stored, mine, self._master_device)
        self.pending_norm = None

    def weights(self) -> Mapping[str, Tensor]:
        return self.masters

    def begin_step(self, params: AdamParams) -> Step:
        gradients = self._pending or {n: torch.zeros_like(self.masters[n].detach()) for n in self.shards.mine()}
        return Step(self.optimizer, self.masters, gradients, params, self.pending_norm)

    def end_step(self) -> None:
        self.drop_pending()
        self._copy.refresh(self)

    def capture(self, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
        """Copies the model as a Hugging Face folder: fp32 with the optimizer, to resume; else in the base's dtype."""
        base = self._engine.base
        dtype = torch.float32 if optimizer else base.dtype
        weights = self.shards.gathered(self.masters) if optimizer else self._rounded()
        moments = self.optimizer.state() if optimizer else {}
        pending = self._gathered_pending() if gradients else {}
        if self.shards.ranks.rank != 0:
            return NO_FILES
        write_model = huggingface_writer(self._form, weights, dtype, base.tokenizer)
        size = write_model.size + sum(tensor.nbytes for tensor in (*moments.values(), *pending.values()))
        return Writer(partial(_write, write_model, moments, pending), size)

    def export(self) -> Writer:
        return self.capture(optimizer=False)

    def check_same_shape(self, other: ModelState) -> None:
        """Accepts any state: both have the base's shapes, and reading the files checks the role."""
        return

    def _rounded(self) -> dict[str, Tensor]:
        """Copies the weights, in the base's dtype, to the CPU of rank 0; returns nothing on the others.

        Below ZeRO stage 3 the engine's copy is whole on rank 0. It has the same bits, half the bytes, and needs no
        collective.
        """
        whole = all(copy.shape == self.masters[name].shape for name, copy in self.copies.items())
        if whole and self._copy.shows(self):
            return copied(self.copies) if self.shards.ranks.rank == 0 else {}
        return self.shards.gathered(self.masters, dtype=self._engine.base.dtype)

    def _gathered_pending(self) -> dict[str, Tensor]:
        """Copies the pending gradient to the CPU of rank 0; returns nothing on the others, or without one."""
        if self._pending is None:  # on every rank
            return {}
        elsewhere = {n: torch.empty(master.shape, device="meta") for n, master in self.masters.items()}
        return self.shards.gathered({**elsewhere, **self._pending})

    def _copy_of(self, name: str, engine: Engine) -> nn.Parameter:
        if self.adapter is not None and self.adapter.value_head is not None and name == VALUE_HEAD:
            return self.adapter.value_head
        return engine.trained[name]

    @property
    def _sums_by_layer(self) -> bool:
        return self._engine.shards_gradients and self.shards.split

    def _on_layer_gradients(self, layer: nn.Module) -> None:
        """Sums the gradients of finished layers in the fixed order: a layer waits for all layers before it."""
        self._finished_layers.add(layer)
        while self._unsummed and self._unsummed[0][0] in self._finished_layers:
            self._sum_next()

    def _sum_next(self) -> None:
        """Sums the next tensor's gradient. It stays the next one if memory runs out before the collective."""
        _, name = self._unsummed[0]
        mine = self._summable(name, self._engine.take_gradient(self.copies[name]))
        self._unsummed.popleft()
        self._sum(name, mine)

    def _summable(self, name: str, gradient: Tensor | None) -> Tensor:
        """Returns this rank's gradient in the form that the ranks sum."""
        device = self.shards.device if self.shards.ranks.size > 1 else self._master_device
        if gradient is None:
            return torch.zeros(self.masters[name].shape, device=device)
        return gradient.to(device).float().contiguous()

    def _sum(self, name: str, mine: Tensor) -> None:
        """Adds the sum over the ranks to the found gradient: on the owner, or everywhere if nothing is split."""
        if self.shards.split:
            self.shards.ranks.sum_on_(mine, self.shards.owners[name])
        else:
            self.shards.ranks.sum_([mine])
        if self.shards.owns(name):
            self._add(name, mine)

    def _add(self, name: str, gradient: Tensor) -> None:
        gradient = gradient.to(self._master_device)
        known = self._found.get(name)
        self._found[name] = gradient.float() if known is None else known.add_(gradient)


@dataclass(frozen=True, slots=True)
class FullFinetuneModels:
    """The Models of a full fine-tuning trainer. `source` is the base's folder; `master_device` is the device of the
    masters."""

    engine: Engine
    copy: ComputeCopy
    source: str
    master_device: torch.device

    def fresh(self, op: Create) -> FullFinetuneState:
        """Loads the base's weights in their files' own precision, which may be finer than the engine's."""
        if op.lora is not None:
            raise UserOpError("this trainer trains the base's own weights, not LoRA adapters")
        form = self._form(op.critic)
        shards = self._shards(form)
        weights = base_model.read_weights(self.source, self.engine.base.model, {*shards.mine()})
        if op.critic:
            weights[VALUE_HEAD] = lora.new_value_head(self.engine.base.model, torch.Generator("cpu").manual_seed(0))
        return self._state_of(weights, form, shards)

    def read(self, folder: Path, *, optimizer: bool, critic: bool) -> FullFinetuneState:
        form = self._form(critic)
        shards = self._shards(form)
        try:
            _check_class(folder, form)
            check_config(folder, form)
            weights = base_model.read_weights(str(folder), form, {*shards.mine()})
            state = self._state_of(weights, form, shards)
        except (OSError, ValueError, KeyError) as error:
            raise UserOpError(f"{folder.name} holds no weights for this model: {error}") from None
        if optimizer:
            state.optimizer.restore(read_optimizer(folder))
        return state

    def _form(self, critic: bool) -> Any:
        """Returns a model of the class that is saved. Raises UserOpError where transformers has none for a critic."""
        base = self.engine.base
        if not critic:
            return base.model
        classifier = _classifier(base.model)
        names = set() if classifier is None else classifier.state_dict().keys()
        if VALUE_HEAD not in names or not names <= {*self.engine.trained, VALUE_HEAD}:
            raise UserOpError(f"transformers has no sequence classifier to save a critic on {base.info.arch} as")
        return classifier

    def _shards(self, form: Any) -> Shards:
        """Assigns the form's weights to ranks."""
        sizes = {name: _shape(parameter).numel() for name, parameter in form.named_parameters()}
        return Shards.of(sizes, self.engine.ranks, self.engine.base.device, split=self.engine.shards_optimizer)

    def _state_of(self, weights: Mapping[str, Tensor], form: Any, shards: Shards) -> FullFinetuneState:
        """Makes a state of all of the form's weights; leaves out those that a critic does not use.

        Of `weights`, a rank needs its own; the others may be empty.
        """
        masters = {}
        for name, parameter in form.named_parameters():
            weight = weights[name]
            mine = weight.to(self.master_device) if shards.owns(name) else torch.empty(_shape(parameter), device="meta")
            masters[name] = nn.Parameter(mine)
        return FullFinetuneState(self.engine, self.copy, form, masters, shards)


def _last_layer_first(
    layers: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[nn.Module | None, str]]:
    """Returns (layer, name) for each parameter. Those of no layer come last, under None.

    A parameter of several layers counts for the first one, at which the backward pass arrives last.
    """
    layer_of = {id(parameter): layer for layer in reversed(layers) for parameter in layer.parameters()}
    places = {layer: place for place, layer in enumerate([*reversed(layers), None])}
    found = [(layer_of.get(id(parameter)), name) for name, parameter in parameters.items()]
    return sorted(found, key=lambda one: places[one[0]])


def _shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter. ZeRO-3 empties it and keeps a record."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _value_head(shape: torch.Size, device: torch.device) -> Adapter:
    """Makes an adapter that holds only a critic's head."""
    return Adapter(LoraSpec(rank=1), {}, nn.Parameter(torch.zeros(shape, device=device)))


def _classifier(model: Any) -> Any:
    """Makes transformers' sequence classifier of one label on this architecture, without memory; None without one."""
    config = deepcopy(model.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        return None


def _check_class(folder: Path, form: Any) -> None:
    """Raises ValueError when the folder's model is of another class: a critic's class differs from a policy's."""
    (found,) = json.loads((folder / "config.json").read_text())["architectures"]
    if found != type(form).__name__:
        raise ValueError(f"it is a {found}, not a {type(form).__name__}")


def _write(write_model: Writer, moments: Mapping[str, Tensor], pending: Mapping[str, Tensor], folder: Path) -> None:
    write_model(folder)
    for name, tensors in ((OPTIMIZER_FILE, moments), (GRADIENTS_FILE, pending)):
        if tensors:
            save_file(dict(tensors), folder / name)

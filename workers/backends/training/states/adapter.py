"""State of LoRA adapters. Every rank holds all of an adapter and of its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from app.domain.ops import AdamParams, LoraSpec
from app.errors import UserOpError
from workers.backends.devices import copied
from workers.backends.training.base import GRADIENTS_FILE, OPTIMIZER_FILE, Create, Writer
from workers.backends.training.engine import Engine
from workers.backends.training.optimizer import MOMENTS, ShardedAdamW, Step, foreign_state
from workers.backends.training.ranks import Shards
from workers.backends.training.states.base import NO_FILES, ModelState, read_optimizer, shaped_as
from workers.models import lora, peft_files
from workers.models.adapter import Adapter, Layout, pieces
from workers.models.full_weights import huggingface_writer

_HOST = torch.device("cpu")


@dataclass(slots=True, eq=False)
class AdapterState:
    """A ModelState of one LoRA adapter, which is packed. The names of `shards` are those of its pieces.

    `pending`: the sum of the gradients since the last step, laid out as `adapter.flat`; None for zero. `pending_norm`:
    its L2 norm, if it is known.
    """

    engine: Engine
    adapter: Adapter
    shards: Shards
    optimizer: ShardedAdamW
    base_model_name: str
    pending: Tensor | None = None
    pending_norm: Tensor | None = None

    @property
    def critic(self) -> bool:
        return self.adapter.critic

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor of the state: weights, optimizer, pending gradient."""
        yield self.adapter.whole
        yield from self.optimizer.tensors()
        if self.pending is not None:
            yield self.pending

    def move(self, device: torch.device) -> None:
        for tensor in self.tensors():
            tensor.data = tensor.data.to(device, copy=True)
        self.adapter.follow()

    def begin(self) -> None:
        return

    def collect(self) -> None:
        return

    def sum_found(self) -> None:
        """Sums the gradient over the ranks; a parameter without one counts as zero.

        With several ranks, one rank may have had no datum of this adapter.
        """
        self.shards.ranks.sum_([self.adapter.gradient()])

    def found_gradients(self) -> Mapping[str, Tensor]:
        return pieces(self.adapter.gradient())

    def keep(self, norm: Tensor) -> None:
        found = self.adapter.gradient()
        if self.pending is None:
            self.pending, self.pending_norm = found, norm
        else:
            self.pending.add_(found)
            self.pending_norm = None

    def drop_found(self) -> None:
        self.adapter.drop_gradients()

    def drop_pending(self) -> None:
        self.pending = self.pending_norm = None

    def pending_gradients(self) -> Mapping[str, Tensor]:
        return {} if self.pending is None else self.adapter.layout.parts(self.pending)

    def restore_pending(self, stored: Mapping[str, Tensor]) -> None:
        shaped = shaped_as(stored, self.adapter.tensors, _HOST)
        self.pending, self.pending_norm = self.adapter.layout.joined(shaped, self.engine.base.device), None

    def restore_optimizer(self, stored: Mapping[str, Tensor]) -> None:
        """Restores the state that `capture` wrote. Raises UserOpError when a tensor is missing or misshapen."""
        try:
            found = {"step": stored["step"]}
            for moment in MOMENTS:
                of_moment = {name: stored[f"{moment}.{name}"] for name in self.adapter.tensors}
                flat = self.adapter.layout.joined(of_moment, _HOST)
                found |= {f"{moment}.{name}": piece for name, piece in pieces(flat).items()}
        except (KeyError, RuntimeError) as error:
            raise foreign_state(error) from None
        self.optimizer.restore(found)

    def weights(self) -> Mapping[str, Tensor]:
        return pieces(self.adapter.whole.detach())

    def begin_step(self, params: AdamParams) -> Step:
        gradient = torch.zeros_like(self.adapter.whole.detach()) if self.pending is None else self.pending
        return Step(self.optimizer, self.weights(), pieces(gradient), params, self.pending_norm)

    def end_step(self) -> None:
        self.drop_pending()
        self.shards.share_(self.weights())

    def capture(self, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
        """Copies the adapter and its optimizer's state, to be written as PEFT files and OPTIMIZER_FILE."""
        moments = self.optimizer.state(pinned=True) if optimizer else {}
        if self.shards.ranks.rank != 0:
            return NO_FILES
        pending = {"pending": self.pending} if gradients and self.pending is not None else {}
        dtype = self.engine.base.dtype if rounded else torch.float32
        flat = copied({**pending, "weights": self.adapter.whole}, pinned=True, dtype=dtype)
        adapter, layout = self.adapter.packed(flat["weights"]), self.adapter.layout
        # `write` keeps no state.
        base_model_name, model, names = self.base_model_name, self.engine.base.model, self.shards.owners

        def write(folder: Path) -> None:
            peft_files.write(adapter, folder, base_model_name, model)
            if moments:
                save_file(_named(moments, names, layout), folder / OPTIMIZER_FILE)
            if "pending" in flat:
                save_file(layout.parts(flat["pending"]), folder / GRADIENTS_FILE)

        return Writer(write, sum(tensor.nbytes for tensor in (*flat.values(), *moments.values())))

    def export(self) -> Writer:
        if self.critic:
            raise UserOpError("a critic's value head is not part of a Hugging Face causal model; export its adapter")
        base, full_weights = self.engine.base, self.engine.merged(self.adapter)
        if self.engine.ranks.rank != 0:
            return NO_FILES
        return huggingface_writer(base.model, full_weights, base.dtype, base.tokenizer)

    def check_same_shape(self, other: ModelState) -> None:
        assert other.adapter is not None
        mine, theirs = ({n: tuple(p.shape) for n, p in a.tensors.items()} for a in (self.adapter, other.adapter))
        if mine != theirs:
            raise UserOpError(
                f"the checkpoint holds a rank {other.adapter.spec.rank} adapter on {len(other.adapter.pairs)} linear "
                f"layers, but this model has a rank {self.adapter.spec.rank} adapter on {len(self.adapter.pairs)}; "
                "create a new model from the checkpoint instead"
            )
        if self.adapter.scaling != other.adapter.scaling:
            raise UserOpError(
                f"the checkpoint's adapter is scaled by {other.adapter.scaling:g} (alpha / rank), but this model's by "
                f"{self.adapter.scaling:g}; create a new model from the checkpoint instead"
            )


@dataclass(frozen=True, slots=True)
class AdapterModels:
    """The Models of a trainer of LoRA adapters."""

    engine: Engine
    base_model_name: str

    def fresh(self, op: Create) -> AdapterState:
        if op.lora is None:
            raise UserOpError("this trainer trains LoRA adapters, not the base's own weights")
        return self._state_of(lora.new_adapter(self.engine.base.model, op.lora, critic=op.critic))

    def read(self, folder: Path, *, optimizer: bool, critic: bool) -> AdapterState:
        adapter = peft_files.read(folder)
        lora.check_role(adapter, critic=critic)
        lora.check_fits(adapter, self.engine.base.model)
        state = self._state_of(adapter)
        if optimizer:
            state.restore_optimizer(read_optimizer(folder))
        return state

    def _state_of(self, adapter: Adapter) -> AdapterState:
        if not adapter.pairs:
            raise UserOpError(
                f"{_groups(adapter.spec)} selects no linear layer of {self.engine.base.info.arch}; set more of them "
                "to true"
            )
        device = self.engine.base.device
        adapter = adapter.to(device)
        weights = pieces(adapter.whole.detach())
        sizes = {name: piece.numel() for name, piece in weights.items()}
        shards = Shards.of(sizes, self.engine.ranks, device, split=self.engine.shards_optimizer)
        return AdapterState(self.engine, adapter, shards, ShardedAdamW(weights, shards), self.base_model_name)


def _named(stored: Mapping[str, Tensor], names: Iterable[str], layout: Layout) -> dict[str, Tensor]:
    """The optimizer's state by the names of the adapter's tensors. `names`: those of the pieces."""
    found = {"step": stored["step"]}
    for moment in MOMENTS:
        flat = torch.cat([stored[f"{moment}.{name}"].flatten() for name in names])
        found |= {f"{moment}.{name}": part for name, part in layout.parts(flat).items()}
    return found


def _groups(spec: LoraSpec) -> str:
    return f"train_attn={spec.train_attn}, train_mlp={spec.train_mlp}, train_unembed={spec.train_unembed}"

"""The engine that runs the base up to its hidden states: the shared part of plain torch and DeepSpeed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from app.domain.ops import LoraSpec
from app.errors import UnservableModel
from app.settings import BaseModelSettings, TrainerSettings
from workers.backends.devices import moved
from workers.backends.training import packing, sequence_parallel
from workers.backends.training.architectures import LogitRule, logit_rule
from workers.backends.training.attention import NAME, packed_attention
from workers.backends.training.lm_head import LmHead, WeightGradient
from workers.backends.training.memory import Activations, bytes_of_trained, checkpointable_layers
from workers.backends.training.packing import runs_of
from workers.backends.training.ranks import RankGroup
from workers.backends.training.sequence_parallel import ALONE, ModelParallelGroup
from workers.models import base_model, experts, fused, images, lora, quantized, routers
from workers.models.adapter import Adapter
from workers.models.base_model import LoadedBase
from workers.models.images import Picture
from workers.models.lora import LoraLinear
from workers.models.routers import Routing
from workers.models.tensor_parallel import SplitLayers

_HEAD = "lm_head"
_BODY = "model"
# The adapter under which a pass's memory is measured. Most of it is the inputs of the linears, whatever the rank.
_PROBE = LoraSpec(rank=16, train_unembed=False)
# What the code of a model raises for an input that it does not take.
_WRONG_INPUT = (AttributeError, TypeError, ValueError, LookupError, AssertionError)
Owners = Sequence[tuple[Adapter | None, int]]
"""Consecutive datums that run under the same adapter: (adapter, number of datums)."""


class EngineLost(RuntimeError):
    """The engine can run no other pass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine(ABC):
    """A loaded base: frozen with wrapped linears (workers/models/lora.py), or itself trained.

    `trained`: the base's own parameters by name, in full fine-tuning. `shards_optimizer`: the ranks split each model's
    optimizer state, and with `shards_gradients` the gradients of the base's parameters. `collective_passes`: every rank
    must run the same number of passes, because a forward or backward is itself a collective. `sequence`: the ranks that
    share each micro-batch.
    """

    base: LoadedBase
    hidden_states: HiddenStates
    ranks: RankGroup
    trained: Mapping[str, nn.Parameter] = field(default_factory=dict)
    shards_optimizer: bool = False
    shards_gradients: bool = False
    collective_passes: bool = False
    sequence: ModelParallelGroup = ALONE
    head_gradient: WeightGradient = field(default_factory=WeightGradient)

    @contextmanager
    def head(self) -> Iterator[LmHead]:
        """Yields the head, which computes logprobs from hidden states.

        All of its weight is on this rank within the block, so this is a collective.
        """
        rule = logit_rule(self.base.model)
        if rule is None:
            yield LmHead(None, _HEAD, LogitRule())
            return
        linear = self.base.model.get_submodule(_HEAD)
        weight = (linear.base if isinstance(linear, LoraLinear) else linear).weight
        with self.gathered(weight):
            gradient = self.head_gradient if self.trained else None
            yield LmHead(weight.detach(), _HEAD, rule, gradient, self.hidden_states.fused)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns and removes a trained parameter's gradient, None without one: fp32 for the head, else in the base's
        dtype."""
        found, parameter.grad = parameter.grad, None
        of_head = self.head_gradient.found
        if of_head is None or parameter is not self.base.model.get_output_embeddings().weight:
            return found
        self.head_gradient.found = None
        return of_head if found is None else of_head.add_(found)

    def gathered(self, parameter: Tensor) -> AbstractContextManager[None]:
        """Keeps all of `parameter` on this rank within the block."""
        return nullcontext()

    def whole(self, name: str, weight: Tensor) -> Tensor:
        """Returns all of the base's weight `name` (as in an unwrapped model) on rank 0, from what `gathered` keeps of
        it. A collective."""
        return weight

    @torch.no_grad()
    def merged(self, adapter: Adapter) -> dict[str, Tensor]:
        """Returns every parameter of the base with `adapter`, by its name in an unwrapped model, on the CPU of rank 0;
        nothing elsewhere. A collective.

        A tied head has an entry only when the adapter sits on it.
        """
        model = self.base.model
        found: dict[str, Tensor] = {}
        for wrapped, weight in quantized.weights(model):
            name = lora.unwrapped_name(model, wrapped)
            pair = adapter.pairs.get(experts.pair_path(name))
            if pair is None and name in model.all_tied_weights_keys:
                continue
            parameter = quantized.plain(weight)
            with self.gathered(parameter):
                parameter = self.whole(name, parameter)
                if self.ranks.rank == 0:
                    own = parameter if pair is None else lora.merged(model, name, parameter, pair, adapter.scaling)
                    found[name] = own.detach().to("cpu")  # no copy on a CPU: the base is frozen
        return found

    def write(self, parameter: nn.Parameter, value: Tensor | None, owner: int) -> None:
        """Writes `value`, cast, to `parameter`.

        With `shards_optimizer` a collective: every rank gets the value of rank `owner`, and the others may give None.
        Otherwise each rank writes its own value.
        """
        with torch.no_grad():
            if value is not None:
                parameter.copy_(value)
        if self.shards_optimizer:
            self.ranks.broadcast_([parameter], owner)

    def rest(self) -> None:
        """Releases what a pass leaves gathered on this rank (weights, at ZeRO stage 3). Called after a pass, whole or
        failed. Raises EngineLost when no other pass can run."""
        return

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Returns the trainer's class, ZeRO stage (None without DeepSpeed) and base elements held here, read live."""


class TorchEngine(Engine):
    """An Engine over the unchanged transformers model, in one process."""

    def describe(self) -> Mapping[str, Any]:
        return {
            "trainer": type(self.base.model).__name__,
            "zero_stage": None,
            "base_elements_held": elements_held(self.base.model),
        }


def elements_held(model: nn.Module) -> int:
    """Counts the elements of the model's weights that this process holds now; ZeRO-3 empties them between uses."""
    return sum({id(weight): weight.shape.numel() for _, weight in quantized.weights(model)}.values())


class HiddenStates(nn.Module):
    """Computes the last hidden states of known architectures (workers/backends/training/architectures.py); else logits.

    Other architectures give hidden states only where `forward` gets `hidden`, as for critics.

    `packed`: datums lie end to end and no token is padding. Otherwise datums are padded on the right to the longest.
    `fused`: the head runs fused kernels, and layers where there are some for them (workers/models/fused.py).
    `routed`: the numbers of layers with a known router, and of experts in each.
    `layers`: the layers, if the architecture has some that transformers can checkpoint; they may be nested.
    `on_layer_gradients`: called with each layer once a backward pass has all gradients of its weights.
    """

    def __init__(
        self,
        model: Any,
        trainer: TrainerSettings,
        agreed: Callable[[int], int] = int,
        sequence: ModelParallelGroup = ALONE,
        split_layers: SplitLayers | None = None,
    ) -> None:
        """Prepares `model`, a transformers PreTrainedModel. `agreed`: see Activations. `sequence`: ranks that share
        every forward: its tokens, or all of its tokens with `split_layers`, which are split among them.

        From here on, a known model computes attention with workers/backends/training/attention.py. Raises SetupError
        when `trainer` wants activation checkpointing and the model has no layers made for it, or when the ranks cannot
        share its tokens.
        """
        super().__init__()
        self.model = model
        self.packed = logit_rule(model) is not None
        self._split_layers, self._sequence = split_layers, sequence
        self._token_group = ALONE if split_layers else sequence  # the ranks among which the layers share the tokens
        name = NAME
        if self._token_group.size > 1:
            sequence_parallel.check(model, sequence.size, packed=self.packed)
            name = sequence_parallel.NAME
            AttentionInterface.register(name, sequence_parallel.over_ranks(packed_attention, sequence))
        if self.packed:
            model.set_attn_implementation({_text_config_name(model.config): name})
            packing.prepare(model)
        self.routed = routers.wrap(model) if self.packed else (0, 0)  # padded datums are not routed
        self.fused = trainer.fused_kernels and fused.usable(next(model.parameters()).device)
        if self.fused and self.packed:  # the architectures of which tests/parity/test_fused.py shows the results
            fused.fuse(model)
        self.layers = checkpointable_layers(model)
        self.on_layer_gradients: Callable[[nn.Module], None] | None = None
        self._activations = Activations(model, trainer.activation_checkpointing, agreed)
        self._trainer = trainer

    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        owners: Owners,
        *,
        hidden: bool = False,
        picture: Picture | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Maps int64 [T], the datums' tokens end to end, to hidden states [T, hidden size].

        An architecture without a logit rule gives logits [T, vocabulary] instead, unless `hidden`.

        `picture`: the images among the tokens. `routing`: where there are routers, the tokens' experts; each rank
        counts those of its own rows. Ranks that share the tokens get their own rows of the result.
        """
        count = len(tokens) if self.packed else len(lengths) * max(lengths)
        with self._activations.during(count, tokens.device, partial(self._probe, tokens.device)), self._watched():
            if picture is not None:
                with _routed(routing, slice(0, len(tokens))):
                    return self._seen(tokens, lengths, owners, picture)
            return self._run(tokens, lengths, owners, hidden=hidden, routing=routing)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Calls `on_layer_gradients` in the backward pass of the block's forward.

        A layer's weights have all their gradients when the gradient in its first input is there, since autograd runs
        what is ready from the forward's last operation to the first. Every rank leaves all layers, in one order, also
        if it does not use some of their weights.
        """
        on_layer_gradients = self.on_layer_gradients
        if on_layer_gradients is None:
            yield
            return
        entered: set[nn.Module] = set()

        def enter(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if layer not in entered and inputs and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: on_layer_gradients(layer))
                entered.add(layer)

        hooks = [layer.register_forward_pre_hook(enter) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def micro_batch_tokens(self, device: torch.device) -> int:
        """Returns the tokens of a micro-batch on `device`: see Activations.

        If the base itself is trained, its gradients and optimizer state will take a part of what is free now.
        """
        reserved = bytes_of_trained(self.model, self._trainer) if self._trained() else 0
        probe = partial(self._probe, device)
        return self._activations.micro_batch_tokens(device, probe, packed=self.packed, reserved=reserved)

    def _probe(self, device: torch.device, count: int) -> None:
        """Runs `count` tokens through the base with an adapter on every linear, unless the base itself is trained."""
        owners = [(self._probe_adapter(device), 1)]
        self._run(torch.zeros(count, dtype=torch.int64, device=device), [count], owners, hidden=True)

    @torch.no_grad()
    def check_runs(self, settings: BaseModelSettings, device: torch.device) -> None:
        """Tries an architecture that is not listed on a datum, beside the first half of the same datum.

        Raises UnservableModel when its code refuses text alone, or when the halves have different logits: then tokens
        see later ones. An error of the machine, of memory or of another rank is raised unchanged, since it may pass.
        """
        if self.packed:
            return
        tokens = torch.arange(1, 9, device=device)
        try:
            logits = self._run(torch.cat([tokens, tokens[:4]]), [8, 4], [(self._probe_adapter(device), 2)])
        except _WRONG_INPUT as error:
            raise UnservableModel(f"base model {settings.name!r} cannot run text alone: {error!r}") from error
        centred = logits.float() - logits.float().mean(-1, keepdim=True)  # an offset of all tokens changes no logprob
        whole, half = centred[:4], centred[8:]
        # Tiny random encoders differ by 0.17 and more. Causal models differ by rounding at most.
        if (half - whole).norm() > torch.finfo(logits.dtype).eps ** 0.5 * whole.norm():
            raise base_model.not_causal(settings)

    def _probe_adapter(self, device: torch.device) -> Adapter | None:
        return None if self._trained() else lora.new_adapter(self.model, _PROBE).to(device)

    def _trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.model.parameters())

    def _run(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        owners: Owners,
        *,
        hidden: bool = False,
        routing: Routing | None = None,
    ) -> Tensor:
        if not self.packed:
            return self._padded(tokens, lengths, owners, hidden)
        if self._split_layers is None:
            return self._packed(tokens, lengths, owners, routing)
        parts = [(None if adapter is None else self._split_layers.own(adapter), count) for adapter, count in owners]
        return sequence_parallel.own_rows(self._packed(tokens, lengths, parts, routing), self._sequence)

    def _packed(self, tokens: Tensor, lengths: Sequence[int], owners: Owners, routing: Routing | None) -> Tensor:
        own = self._token_group.own(len(tokens))
        if missing := self._token_group.missing(len(tokens)):  # a datum of its own, so that no other one sees it
            tokens, lengths = nn.functional.pad(tokens, (0, missing)), [*lengths, missing]
        rows = self._token_group.own(len(tokens))
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        segments = list(lora.within([*_segments(owners, lengths), (None, missing)], rows))
        with lora.use(segments), _routed(routing, rows):
            output = self.model.get_submodule(_BODY)(
                tokens[None, rows], position_ids=positions[None, rows], use_cache=False, runs=runs_of(lengths)
            )
        return output.last_hidden_state[0, : own.stop - own.start]  # type: ignore[no-any-return]

    def _seen(self, tokens: Tensor, lengths: Sequence[int], owners: Owners, picture: Picture) -> Tensor:
        """The same as `_packed` with images: the language model gets embeddings in the place of tokens."""
        row = images.embed(self.model, tokens, picture).row()
        with lora.use(_segments(owners, lengths)):
            output = self.model.get_submodule(_BODY).language_model(**row, use_cache=False, runs=runs_of(lengths))
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _padded(self, tokens: Tensor, lengths: Sequence[int], owners: Owners, hidden: bool) -> Tensor:
        longest = max(lengths)
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        real = moved(real, tokens.device)
        rows = torch.zeros(real.shape, dtype=tokens.dtype, device=tokens.device).masked_scatter_(real, tokens)
        with lora.use(_segments(owners, [longest] * len(lengths))):
            if hidden:
                return self.model.base_model(rows, use_cache=False).last_hidden_state[real]  # type: ignore[no-any-return]
            return self.model(rows, use_cache=False).logits[real]  # type: ignore[no-any-return]


def _routed(routing: Routing | None, rows: slice) -> AbstractContextManager[None]:
    return nullcontext() if routing is None else routing.used(rows)


def _text_config_name(config: Any) -> str:
    """Returns the name under which `config` holds that of its language model; "" where it is that itself."""
    text = config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name) is text), "")


def _segments(owners: Owners, lengths: Sequence[int]) -> list[tuple[Adapter | None, int]]:
    """Converts owners from counts of datums to counts of tokens."""
    left = iter(lengths)
    return [(adapter, sum(islice(left, count))) for adapter, count in owners]

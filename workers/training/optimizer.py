"""AdamW over an adapter's fp32 parameters, its state split over the ranks by whole tensors.

Every rank holds every gradient, so each steps the tensors it owns and hands them to the others. A saved state is
gathered, so it does not depend on how many ranks wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.training.ranks import RankGroup

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """torch.optim.AdamW (fused) with the settings given anew at every step.

    `sharded` splits the state; else every rank holds and steps all of it, to the same bits.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: RankGroup, *, sharded: bool) -> None:
        self._parameters = dict(parameters)
        self._ranks = ranks
        self._owner = _owners(self._parameters, ranks.size) if sharded else dict.fromkeys(parameters, ranks.rank)
        self._adamw = torch.optim.AdamW([{"params": [p for _, p in self._owned(ranks.rank)]}], fused=True)
        for _, parameter in self._owned(ranks.rank):
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
        self.steps = 0

    def step(self, gradients: Sequence[Tensor], params: AdamParams) -> float:
        """One step on `gradients` (in the parameters' order; they may be scaled in place).

        Returns their L2 norm before clipping. Raises UserOpError, having changed nothing, when it is not finite.
        """
        norm = get_total_norm(gradients)
        if not norm.isfinite():
            raise UserOpError(f"the gradient's norm is {norm.item()}; no step was taken")
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        if params.grad_clip_norm > 0:
            clip_grads_with_norm_(self._parameters.values(), params.grad_clip_norm, norm)
        self._adamw.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._adamw.step()
        self.steps += 1
        self._share_parameters()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Every rank's state, gathered on every rank (a collective): `moment.parameter` fp32, and `step` int64."""
        found = {"step": torch.tensor(self.steps)}
        for rank in set(self._owner.values()):
            share = {f"{m}.{name}": self._moment(name, p, m) for name, p in self._owned(rank) for m in _MOMENTS}
            if self._is_sharded:
                self._ranks.broadcast_(list(share.values()), rank)
            found |= share
        return found

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave. Raises UserOpError, half done, when a tensor is missing or misshapen."""
        try:
            self.steps = int(stored["step"])
            for name, parameter in self._owned(self._ranks.rank):
                state = self._adamw.state[parameter]
                state["step"].fill_(self.steps)
                for moment in _MOMENTS:
                    state[moment].copy_(stored[f"{moment}.{name}"].view(parameter.shape))
        except (KeyError, RuntimeError) as error:
            raise UserOpError(f"the optimizer state does not belong to this adapter: {error}") from None

    @property
    def _is_sharded(self) -> bool:
        return len(set(self._owner.values())) > 1

    def _owned(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._parameters.items() if self._owner[name] == rank]

    def _moment(self, name: str, parameter: nn.Parameter, moment: str) -> Tensor:
        mine = self._owner[name] == self._ranks.rank
        return self._adamw.state[parameter][moment] if mine else torch.empty_like(parameter, requires_grad=False)

    def _share_parameters(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._is_sharded:
            for rank in range(self._ranks.size):
                self._ranks.broadcast_([p for _, p in self._owned(rank)], rank)


def _owners(parameters: Mapping[str, nn.Parameter], ranks: int) -> dict[str, int]:
    """Largest tensor first, each to the rank that holds least; the same on every rank."""
    loads = [0] * ranks
    owners = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += parameters[name].numel()
    return owners

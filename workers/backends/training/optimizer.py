"""AdamW over fp32 parameters, with its state split over the ranks, tensor by tensor.

Each rank steps the tensors it owns (workers/backends/training/ranks.py). A saved state is gathered, so it does not
depend on the number of ranks that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.backends.training.ranks import Shards

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Without gradients moments shrink to denormal numbers and stay there, and a CPU's step over them takes 15 times as
# long. Setting them to 0 takes 0.4 of a step. An update, exp_avg / (sqrt(exp_avg_sq) + eps), is the same as long as eps
# is far above the square root of the least normal number, 1.1e-19.
_CLEARED_EVERY = 32
_LEAST_EPS = 1e-15
_LEAST_NORMAL = torch.finfo(torch.float32).tiny


class ShardedAdamW:
    """torch.optim.AdamW (fused) that takes its settings anew at every step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: Shards) -> None:
        """`parameters` have the names of `shards`; those that this rank does not own may be on the meta device."""
        self._parameters, self._shards = parameters, shards
        self._mine = {name: parameters[name] for name in shards.mine()}
        self._adamw = torch.optim.AdamW([{"params": [*self._mine.values()]}], fused=True) if self._mine else None
        for parameter in self._mine.values():
            self._state(parameter).update(
                step=torch.zeros((), device=parameter.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS},
            )
        self.steps = 0

    def step(self, gradients: Mapping[str, Tensor], params: AdamParams) -> float:
        """Takes one step of the parameters this rank owns. `gradients`, by name, may be scaled in place.

        Returns the L2 norm of all gradients before clipping. Raises UserOpError, having changed nothing, when it is not
        finite. A collective.
        """
        norm = self._shards.norm(gradients)
        if not norm.isfinite():
            raise UserOpError(f"the gradient norm is {norm.item()}, which is not finite; no step was taken")
        for name, parameter in self._mine.items():
            parameter.grad = gradients[name]
        if params.grad_clip_norm > 0:
            clip_grads_with_norm_(self._mine.values(), params.grad_clip_norm, norm)
        if self._adamw is not None:
            self._adamw.param_groups[0].update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
            self._adamw.step()
            self._adamw.zero_grad()
        self.steps += 1
        if self.steps % _CLEARED_EVERY == 0 and params.eps >= _LEAST_EPS:
            self._clear_denormals()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Copies every rank's state to the CPU of rank 0: `moment.parameter` fp32, `step` int64. A collective.

        The other ranks get only the step.
        """
        found = {"step": torch.tensor(self.steps)}
        for moment in _MOMENTS:
            gathered = {
                name: self._state(p)[moment] if name in self._mine else p for name, p in self._parameters.items()
            }
            found |= {f"{moment}.{name}": tensor for name, tensor in self._shards.gathered(gathered).items()}
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of the state that this rank holds."""
        for parameter in self._mine.values():
            yield from self._state(parameter).values()

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`. Raises UserOpError, half done, when a tensor is missing or misshapen."""
        try:
            self.steps = int(stored["step"])
            for name, parameter in self._mine.items():
                state = self._state(parameter)
                state["step"].fill_(self.steps)
                for moment in _MOMENTS:
                    state[moment].copy_(stored[f"{moment}.{name}"].view(parameter.shape))
        except (KeyError, RuntimeError) as error:
            raise UserOpError(f"the optimizer state does not belong to this model: {error}") from None

    def _clear_denormals(self) -> None:
        """Sets denormal moments on a CPU to 0. Which steps do it depends on their number alone, so that a step that
        runs again has the same bits."""
        for parameter in self._mine.values():
            if parameter.is_cpu:
                for moment in _MOMENTS:
                    tensor = self._state(parameter)[moment]
                    torch.hardshrink(tensor, _LEAST_NORMAL, out=tensor)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        assert self._adamw is not None  # there is at least one parameter
        state: dict[str, Tensor] = self._adamw.state[parameter]
        return state

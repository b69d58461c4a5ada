"""AdamW over fp32 weights, with its state split over the ranks, weight by weight.

Each rank steps the tensors it owns (workers/backends/training/ranks.py). A saved state is gathered, so it does not
depend on the number of ranks that wrote it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.backends.devices import moved
from workers.backends.training.ranks import Shards, total_norms

MOMENTS = ("exp_avg", "exp_avg_sq")
# Without gradients moments shrink to denormal numbers and stay there, and a CPU's step over them takes 15 times as
# long. Setting them to 0 takes 0.4 of a step. An update, exp_avg / (sqrt(exp_avg_sq) + eps), is the same as long as eps
# is far above the square root of the least normal number, 1.1e-19.
_CLEARED_EVERY = 32
_LEAST_EPS = 1e-15
_LEAST_NORMAL = torch.finfo(torch.float32).tiny


class ShardedAdamW:
    """The state of AdamW; `step_all` takes its steps, each with settings of its own."""

    def __init__(self, weights: Mapping[str, Tensor], shards: Shards) -> None:
        """`weights` have the names of `shards`; those that this rank does not own may be on the meta device."""
        self.shards = shards
        self._shapes = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
        self._moments = {
            moment: {name: torch.zeros_like(weights[name], requires_grad=False) for name in shards.mine()}
            for moment in MOMENTS
        }
        self.steps = 0

    def moments(self, key: str) -> list[Tensor]:
        """Returns the "exp_avg" or "exp_avg_sq" of each parameter that this rank owns."""
        return [*self._moments[key].values()]

    def count(self, params: AdamParams) -> None:
        """Counts a step that was taken. On a CPU, sets denormal moments to 0.

        Which steps do so depends on their number alone, so that a step that runs again has the same bits.
        """
        self.steps += 1
        if self.steps % _CLEARED_EVERY == 0 and params.eps >= _LEAST_EPS:
            for tensor in (tensor for moment in MOMENTS for tensor in self.moments(moment) if tensor.is_cpu):
                torch.hardshrink(tensor, _LEAST_NORMAL, out=tensor)

    def state(self, *, pinned: bool = False) -> dict[str, Tensor]:
        """Copies every rank's state to the CPU of rank 0: `moment.parameter` fp32, `step` int64. A collective.

        The other ranks get only the step. `pinned`: see `copied` in workers/backends/devices.py.
        """
        found = {"step": torch.tensor(self.steps)}
        for moment, mine in self._moments.items():
            gathered = self.shards.gathered({**self._shapes, **mine}, pinned=pinned)
            found |= {f"{moment}.{name}": tensor for name, tensor in gathered.items()}
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of the state that this rank holds."""
        for mine in self._moments.values():
            yield from mine.values()

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`. Raises UserOpError, half done, when a tensor is missing or misshapen."""
        try:
            self.steps = int(stored["step"])
            for moment, mine in self._moments.items():
                for name, tensor in mine.items():
                    tensor.copy_(stored[f"{moment}.{name}"].view(tensor.shape))
        except (KeyError, RuntimeError) as error:
            raise foreign_state(error) from None


def foreign_state(error: Exception) -> UserOpError:
    """The failure to restore a state, of which a tensor is missing or misshapen."""
    return UserOpError(f"the optimizer state does not belong to this model: {error}")


@dataclass(frozen=True, slots=True)
class Step:
    """A step to take of `weights`, by name. Their `gradients` may be scaled in place. `norm`: the L2 norm of those, if
    every rank knows it."""

    optimizer: ShardedAdamW
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    params: AdamParams
    norm: Tensor | None = None

    def mine(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns those of the weights or gradients that this rank owns."""
        return [tensors[name] for name in self.optimizer.shards.mine()]


def step_all(steps: Sequence[Step]) -> list[float | UserOpError]:
    """Takes the steps of several models, each with the bits of its step alone. A collective.

    Kernels take the tensors of all models that have the same settings, and the host waits once for all norms that are
    not known. Returns the L2 norm of each model's gradients before clipping. Where it is not finite, returns a
    UserOpError, and that model is unchanged.
    """
    unknown = iter(total_norms([(step.optimizer.shards, step.gradients) for step in steps if step.norm is None]))
    norms = [next(unknown) if step.norm is None else step.norm for step in steps]
    finite = [(step, norm) for step, norm in zip(steps, norms, strict=True) if norm.isfinite()]
    _clip(finite)
    same_settings: defaultdict[AdamParams, list[Step]] = defaultdict(list)
    for step, _ in finite:
        same_settings[replace(step.params, grad_clip_norm=0.0)].append(step)
    for params, group in same_settings.items():
        _adamw(group, params)
    for step, _ in finite:
        step.optimizer.count(step.params)
    return [float(norm) if norm.isfinite() else _not_finite(norm) for norm in norms]


def _not_finite(norm: Tensor) -> UserOpError:
    return UserOpError(f"the gradient norm is {norm.item()}, which is not finite; no step was taken")


def _clip(steps: Sequence[tuple[Step, Tensor]]) -> None:
    """Scales gradients down to their `grad_clip_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    tensors: list[Tensor] = []
    factors: list[float] = []
    for step, norm in steps:
        factor = float(step.params.grad_clip_norm / (norm + 1e-6))
        if step.params.grad_clip_norm > 0 and factor < 1:
            mine = step.mine(step.gradients)
            tensors += mine
            factors += [factor] * len(mine)
    if tensors:
        torch._foreach_mul_(tensors, factors)


@torch.no_grad()
def _adamw(steps: Sequence[Step], params: AdamParams) -> None:
    """Calls torch.optim's kernel. Its function around the kernel needs a step number for each parameter, on the device,
    and walks over all of them three times."""
    weights = [weight for step in steps for weight in step.mine(step.weights)]
    if not weights:
        return
    numbers = moved(torch.tensor([float(step.optimizer.steps + 1) for step in steps]), weights[0].device)
    exp_avgs, exp_avg_sqs = ([tensor for step in steps for tensor in step.optimizer.moments(key)] for key in MOMENTS)
    torch._fused_adamw_(
        weights,
        [gradient for step in steps for gradient in step.mine(step.gradients)],
        exp_avgs,
        exp_avg_sqs,
        [],
        [number for step, number in zip(steps, numbers, strict=True) for _ in step.optimizer.shards.mine()],
        amsgrad=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
    )

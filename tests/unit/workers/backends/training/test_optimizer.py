from __future__ import annotations

import pytest
import torch
from torch import nn

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.backends.training.optimizer import ShardedAdamW, Step, step_all
from workers.backends.training.ranks import RankGroup, Shards


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(n, 3, generator=generator)) for name, n in (("a", 2), ("b", 9), ("c", 4))}


def optimizer_of(own: dict[str, nn.Parameter]) -> ShardedAdamW:
    return ShardedAdamW(own, shards_of(own, RankGroup()))


def shards_of(own: dict[str, nn.Parameter], ranks: RankGroup) -> Shards:
    return Shards.of({name: p.numel() for name, p in own.items()}, ranks, torch.device("cpu"), split=True)


def test_a_gradient_without_a_norm_is_refused_and_nothing_moves() -> None:
    own = parameters()
    optimizer = optimizer_of(own)
    before = [p.detach().clone() for p in own.values()]
    gradients = {name: torch.full_like(p, 1e30) for name, p in own.items()}
    (error,) = step_all([Step(optimizer, own, gradients, AdamParams())])
    assert isinstance(error, UserOpError) and "inf" in str(error)
    assert all(torch.equal(p, then) for p, then in zip(own.values(), before, strict=True))
    assert optimizer.steps == 0


def run(own: dict[str, nn.Parameter], optimizer: ShardedAdamW, first: int, last: int, params: AdamParams) -> None:
    """Steps `first` to `last`; only the first of all has gradients."""
    for step in range(first, last + 1):
        gradients = {name: torch.full_like(p, float(step == 1)) for name, p in own.items()}
        step_all([Step(optimizer, own, gradients, params)])


def denormal(optimizer: ShardedAdamW) -> int:
    tensors = (tensor for tensor in optimizer.tensors() if tensor.ndim)
    return sum(int(((tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)).sum()) for tensor in tensors)


def test_moments_without_gradients_do_not_stay_denormal_and_each_step_is_that_of_torch() -> None:
    own, reference = parameters(), parameters()
    optimizer, params = optimizer_of(own), AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.8)
    adamw = torch.optim.AdamW(reference.values(), 0.01, (0.9, 0.8), params.eps, params.weight_decay, fused=True)
    found = []
    for step in range(1, 1025):
        run(own, optimizer, step, step, params)
        for p in reference.values():
            p.grad = torch.full_like(p, float(step == 1))
        adamw.step()
        found.append(denormal(optimizer))
        assert all(torch.equal(own[name], reference[name]) for name in own), step
    assert max(found) > 0, "the moments have been denormal"
    assert [*found[31::32]] == [0] * 32
    assert not any(tensor.any() for tensor in optimizer.tensors() if tensor.ndim)


def test_a_step_that_runs_again_clears_the_same_moments() -> None:
    params = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.8)
    live, again = parameters(), parameters()
    optimizer, restored = optimizer_of(live), optimizer_of(again)
    run(live, optimizer, 1, 810, params)
    stored = optimizer.state()
    assert denormal(optimizer) > 0
    run(live, optimizer, 811, 840, params)
    assert denormal(optimizer) == 0
    run(again, restored, 1, 1, params)
    restored.restore(stored)
    run(again, restored, 811, 840, params)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.tensors(), restored.tensors(), strict=True))


def test_moments_stay_as_they_are_where_eps_is_so_small_that_they_matter() -> None:
    own = parameters()
    optimizer = optimizer_of(own)
    run(own, optimizer, 1, 864, AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.8, eps=1e-30))
    assert denormal(optimizer) > 0


def test_a_state_of_another_adapter_is_refused() -> None:
    stored = optimizer_of(parameters()).state()
    other = {"a": nn.Parameter(torch.zeros(7, 3))}
    with pytest.raises(UserOpError):
        optimizer_of(other).restore(stored)
    with pytest.raises(UserOpError):
        optimizer_of({"d": nn.Parameter(torch.zeros(1))}).restore(stored)


def test_every_tensor_has_one_owner_and_the_load_is_even() -> None:
    shards = shards_of({**parameters(), "d": nn.Parameter(torch.zeros(4, 3))}, RankGroup(0, 2))
    assert shards.owners == {"b": 0, "c": 1, "d": 1, "a": 1}

from __future__ import annotations

import pytest
import torch
from torch import nn

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.backends.training.optimizer import ShardedAdamW
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
    with pytest.raises(UserOpError, match="inf"):
        optimizer.step({name: torch.full_like(p, 1e30) for name, p in own.items()}, AdamParams())
    assert all(torch.equal(p, then) for p, then in zip(own.values(), before, strict=True))
    assert optimizer.steps == 0


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

from __future__ import annotations

import pytest
import torch
from torch import nn

from app.domain.ops import AdamParams
from app.errors import UserOpError
from workers.training.optimizer import ShardedAdamW, _owners
from workers.training.ranks import RankGroup


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(n, 3, generator=generator)) for name, n in (("a", 2), ("b", 9), ("c", 4))}


def test_a_gradient_without_a_norm_is_refused_and_nothing_moves() -> None:
    own = parameters()
    optimizer = ShardedAdamW(own, RankGroup(), sharded=False)
    before = [p.detach().clone() for p in own.values()]
    with pytest.raises(UserOpError, match="inf"):
        optimizer.step([torch.full_like(p, 1e30) for p in own.values()], AdamParams())
    assert all(torch.equal(p, then) for p, then in zip(own.values(), before, strict=True))
    assert optimizer.steps == 0


def test_a_state_of_another_adapter_is_refused() -> None:
    stored = ShardedAdamW(parameters(), RankGroup(), sharded=False).state()
    other = {"a": nn.Parameter(torch.zeros(7, 3))}
    with pytest.raises(UserOpError):
        ShardedAdamW(other, RankGroup(), sharded=False).restore(stored)
    with pytest.raises(UserOpError):
        ShardedAdamW({"d": nn.Parameter(torch.zeros(1))}, RankGroup(), sharded=False).restore(stored)


def test_every_tensor_has_one_owner_and_the_load_is_even() -> None:
    owners = _owners({**parameters(), "d": nn.Parameter(torch.zeros(4, 3))}, 2)
    assert owners == {"b": 0, "c": 1, "d": 1, "a": 1}

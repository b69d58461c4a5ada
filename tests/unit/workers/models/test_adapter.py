"""The tensors of an adapter as parts of one flat tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from app.domain.ops import AdamParams, LoraSpec
from workers.backends.training.optimizer import ShardedAdamW, Step, step_all
from workers.backends.training.ranks import RankGroup, Shards
from workers.models.adapter import Adapter, Layout, LoraPair, pieces

CPU = torch.device("cpu")
SHAPES = {"a": (3, 5), "b": (16, 8), "c": (1, 7)}


def packed(rank: int = 3) -> Adapter:
    """A critic's adapter, of which no tensor has a multiple of 64 elements."""
    torch.manual_seed(0)
    widths = {"k_proj": 5, "q_proj": 7, "o_proj": 9}
    pairs = {
        path: LoraPair(nn.Parameter(torch.randn(rank, 10)), nn.Parameter(torch.randn(wide, rank)))
        for path, wide in widths.items()
    }
    return Adapter(LoraSpec(rank=rank), pairs, nn.Parameter(torch.randn(1, 11))).to(CPU)


def with_row() -> Adapter:
    """An adapter that lies as a row of stacks, but for its value head."""
    pairs = {path: LoraPair(nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(16, 8))) for path in "ab"}
    one = Adapter(LoraSpec(rank=8), pairs, nn.Parameter(torch.randn(1, 8))).to(CPU)
    assert one.row is not None and len(one.row) == len(one.whole) - 64
    return one


def values(tensors: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in tensors.items()}


def test_parts_are_views_at_256_bytes_and_the_gaps_are_zero() -> None:
    given, layout = values(SHAPES), Layout(SHAPES)
    flat = layout.joined(given, CPU)
    parts = layout.parts(flat)
    assert flat.shape == (layout.length,) == (64 + 128 + 64,)
    assert {part.storage_offset() % 64 for part in parts.values()} == {0}
    assert all(torch.equal(parts[name], one) for name, one in given.items())
    for part in parts.values():
        part.zero_()
    assert not flat.any()


def test_a_tensor_that_is_missing_or_misshapen_is_refused() -> None:
    given, layout = values(SHAPES), Layout(SHAPES)
    with pytest.raises(RuntimeError):
        layout.joined({**given, "b": torch.zeros(16, 9)}, CPU)
    del given["b"]
    with pytest.raises(KeyError):
        layout.joined(given, CPU)


def test_an_adapter_without_tensors_is_an_empty_one() -> None:
    assert Adapter(LoraSpec(rank=1), {}).to(CPU).whole.shape == (0,)


def test_a_step_on_pieces_is_that_of_each_tensor_and_the_gaps_stay_zero() -> None:
    one = packed()
    reference = {name: nn.Parameter(p.detach().clone()) for name, p in one.tensors.items()}
    params = AdamParams(learning_rate=0.1, weight_decay=0.3)
    adamw = torch.optim.AdamW(reference.values(), 0.1, (params.beta1, params.beta2), params.eps, 0.3, fused=True)
    found = pieces(one.whole.detach())
    shards = Shards.of({name: piece.numel() for name, piece in found.items()}, RankGroup(), CPU, split=True)
    optimizer = ShardedAdamW(found, shards)
    for _ in range(3):
        for name, p in one.tensors.items():
            p.grad = torch.randn(p.shape)
            reference[name].grad = p.grad.clone()
        step_all([Step(optimizer, pieces(one.whole.detach()), pieces(one.gradient()), params)])
        adamw.step()
        one.drop_gradients()
    for name, p in one.tensors.items():
        assert (p - reference[name]).norm() <= 1e-6 * reference[name].norm()
    for p in one.tensors.values():
        p.data.zero_()
    assert not one.whole.any()


def test_a_gradient_is_the_sum_of_what_lies_in_the_flat_one_and_in_the_parameters() -> None:
    one = packed()
    assert not one.gradient().any()
    for name in ("k_proj", "o_proj"):
        one.pairs[name].b.grad = torch.ones_like(one.pairs[name].b)
    first = one.layout.parts(one.gradient().clone())
    one.pairs["k_proj"].b.grad = torch.ones_like(one.pairs["k_proj"].b)
    parts = one.layout.parts(one.gradient())
    found = {name: (float(first[name].sum()), float(part.sum())) for name, part in parts.items() if part.any()}
    prefix = "base_model.model."
    assert found == {f"{prefix}k_proj.lora_B.weight": (15.0, 30.0), f"{prefix}o_proj.lora_B.weight": (27.0, 27.0)}
    one.drop_gradients()
    assert not one.gradient().any()


def test_the_gradient_of_a_row_counts_once() -> None:
    one = with_row()
    assert one.row is not None
    one.row.grad = torch.ones_like(one.row)
    one.pairs["a"].a.grad = torch.ones_like(one.pairs["a"].a)
    for _ in range(2):
        found = one.gradient().tolist()
        assert found == [2.0] * 64 + [1.0] * (len(one.row) - 64) + [0.0] * 64
    one.row.grad = torch.ones_like(one.row)
    assert one.gradient().tolist() == [3.0] * 64 + [2.0] * (len(one.row) - 64) + [0.0] * 64
    one.row.grad = torch.ones_like(one.row)
    one.drop_gradients()
    assert not one.gradient().any()


def test_a_row_follows_a_flat_tensor_whose_data_was_replaced() -> None:
    one = with_row()
    one.whole.data = one.whole.data.clone()
    one.follow()
    one.whole.data.fill_(3)
    assert one.row is not None and one.row.eq(3).all()


def test_parameters_follow_a_flat_tensor_whose_data_was_replaced() -> None:
    one = packed()
    before, places = {name: p.detach().clone() for name, p in one.tensors.items()}, dict(one.tensors)
    one.whole.data = one.whole.data.clone()
    one.follow()
    one.whole.data.mul_(2)
    assert all(one.tensors[name] is p and torch.equal(p, 2 * before[name]) for name, p in places.items())

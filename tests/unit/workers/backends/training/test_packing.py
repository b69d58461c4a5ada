"""Layers that would run on from a datum into the next, against the same layers on each datum alone."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor, nn

from app.domain.ops import LoraSpec
from workers.backends.training import packing
from workers.backends.training.packing import runs_of
from workers.models import lora
from workers.models.adapter import Adapter, LoraPair
from workers.models.lora import LoraLinear

LENGTHS = (5, 3, 3, 1, 9)
WIDTH = 4


class Mixer(nn.Module):
    """A causal convolution, a running sum as state, and a linear that adapters sit on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.out_proj = LoraLinear(nn.Linear(WIDTH, WIDTH), "out_proj")

    def forward(self, hidden_states: Tensor, attention_mask: None = None, **others: Any) -> Tensor:
        mixed = self.conv1d(hidden_states.transpose(1, 2))[:, :, : hidden_states.shape[1]].transpose(1, 2)
        out: Tensor = self.out_proj(mixed.cumsum(1))
        return out


def adapter(seed: int) -> Adapter:
    torch.manual_seed(seed)
    pair = LoraPair(nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2)))
    return Adapter(LoraSpec(rank=2), {"out_proj": pair})


def models() -> tuple[nn.Module, nn.Module]:
    """Two of the same weights. The second resets its state at datums."""
    alone, packed = nn.Sequential(Mixer()), nn.Sequential(Mixer())
    packed.load_state_dict(alone.state_dict())
    packing.prepare(packed)
    return alone, packed


def test_each_datum_starts_from_the_empty_state_under_its_own_adapter() -> None:
    alone, packed = models()
    hidden = torch.randn(1, sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    adapters = [adapter(1), adapter(1), None, None, adapter(2)]  # neighbours of one length have different ones
    with lora.use(list(zip(adapters, LENGTHS, strict=True))):
        found = packed[0](hidden_states=hidden, attention_mask=None, runs=runs_of(LENGTHS))
    wanted = []
    for one, datum in zip(adapters, hidden.split(LENGTHS, dim=1), strict=True):
        with lora.use([(one, datum.shape[1])]):
            wanted.append(alone[0](datum))
    torch.testing.assert_close(found, torch.cat(wanted, 1))
    found[0, : LENGTHS[0]].sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[0, LENGTHS[0] :].any()


def test_only_layers_with_a_convolution_of_their_own_are_reset() -> None:
    _, packed = models()
    assert [type(layer) for layer in packing.datum_by_datum(nn.Sequential(packed, nn.Conv1d(1, 1, 1)))] == [Mixer]


class Convolution(nn.Module):
    """A causal convolution by itself, as transformers' Inkling has four of in a layer."""

    conv_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)

    def forward(self, hidden_states: Tensor, conv_mask: None = None) -> Tensor:
        added: Tensor = self.conv1d(hidden_states.transpose(1, 2))[:, :, : hidden_states.shape[1]].transpose(1, 2)
        return hidden_states + added


class BiasedAttention(nn.Module):
    """Attention that makes a bias of positions that it counts, behind a convolution of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.rel_logits_proj = Convolution(), nn.Identity()

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        positions = torch.arange(hidden_states.shape[1])[None, :, None]
        return self.convolution(hidden_states) * (1 + positions), None


class ConvolvedLayer(nn.Module):
    """A layer that calls a convolution without its keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.attn_sconv = BiasedAttention(), Convolution()

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        out: Tensor = self.attn_sconv(self.self_attn(hidden_states=hidden_states, **others)[0], conv_mask=None)
        return out


def test_a_convolution_by_itself_starts_empty_at_each_datum_too() -> None:
    torch.manual_seed(0)
    alone, packed = nn.Sequential(ConvolvedLayer()), nn.Sequential(ConvolvedLayer())
    packed.load_state_dict(alone.state_dict())
    packing.prepare(packed)
    hidden = torch.randn(1, sum(LENGTHS), WIDTH)
    for lengths in (LENGTHS, LENGTHS[::-1]):
        found = packed[0](hidden, runs=runs_of(lengths))
        wanted = torch.cat([alone[0](datum) for datum in hidden.split(lengths, dim=1)], 1)
        torch.testing.assert_close(found, wanted)


class Attention(nn.Module):
    """Attention with the fields of transformers' Llama 4, which records the runs of its calls."""

    def __init__(self, *, rope: bool) -> None:
        super().__init__()
        self.config = Namespace(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=4)
        self.layer_idx, self.use_rope, self.attn_temperature_tuning = int(not rope), rope, True
        self.seen: list[Any] = []

    def forward(self, hidden_states: Tensor, runs: Any) -> tuple[Tensor, None]:
        self.seen.append((tuple(hidden_states.shape[:2]), runs))
        return hidden_states, None


def test_attention_within_chunks_takes_them_for_datums() -> None:
    layer = Attention(rope=True)
    packing.prepare(layer)
    layer(hidden_states=torch.zeros(1, sum(LENGTHS), WIDTH), runs=runs_of(LENGTHS))
    assert layer.seen == [((1, 21), runs_of((4, 1, 3, 3, 1, 4, 4, 1)))]


def test_attention_that_counts_positions_gets_each_datum_as_a_row() -> None:
    layer = Attention(rope=False)
    packing.prepare(layer)
    hidden = torch.randn(1, sum(LENGTHS), WIDTH)
    found, _ = layer(hidden_states=hidden, runs=runs_of(LENGTHS))
    assert torch.equal(found, hidden)
    assert layer.seen == [((1, 5), [(1, 5)]), ((2, 3), [(1, 3)]), ((1, 1), [(1, 1)]), ((1, 9), [(1, 9)])]


class IndexedAttention(nn.Module):
    """Attention with an indexer, as transformers' DeepSeek-V3.2 has it: it adds up the positions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = nn.Identity()

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, runs: Any
    ) -> tuple[Tensor, None]:
        cos, sin = position_embeddings
        return hidden_states + attention_mask[0].float() @ (cos + sin), None


def test_attention_with_an_indexer_gets_the_positions_and_the_mask_of_each_datum() -> None:
    layer = IndexedAttention()
    packing.prepare(layer)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None, :, None].float()
    hidden = torch.zeros(1, sum(LENGTHS), WIDTH)
    embeddings = (positions, torch.zeros_like(positions))
    found, _ = layer(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, runs=runs_of(LENGTHS))
    wanted = torch.cat([torch.arange(length).cumsum(0) for length in LENGTHS]).float()
    assert torch.equal(found, wanted[None, :, None].expand_as(found))

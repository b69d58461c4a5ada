"""A layer with a state over datums in one row, against the layer on each datum alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from app.domain.ops import LoraSpec
from workers.backends.training import recurrent
from workers.backends.training.engine import runs_of
from workers.models import lora
from workers.models.lora import Adapter, LoraLinear, LoraPair

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
    recurrent.reset_at_datums(packed)
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
    assert [type(layer) for layer in recurrent.layers(nn.Sequential(packed, nn.Conv1d(1, 1, 1)))] == [Mixer]

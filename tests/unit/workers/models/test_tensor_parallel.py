from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.domain.ops import LoraSpec
from tests.parity import architectures
from workers.models import experts, lora
from workers.models.adapter import Adapter
from workers.models.tensor_parallel import SplitLayers

RANKS = 2


def model(case: str, **shape: Any) -> Any:
    """A model of random weights and biases."""
    config = architectures.config_of(case, **shape)
    torch.manual_seed(0)
    made = architectures.auto_class(type(config)).from_config(config, dtype=torch.float32).requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(0.0, 0.2)
    return made


def parts(case: str, **shape: Any) -> list[tuple[SplitLayers, Any]]:
    """Each rank's own part of the same model."""
    found = []
    for rank in range(RANKS):
        one = model(case, **shape)
        layers = SplitLayers(one, rank, RANKS, None)
        for name, parameter in one.named_parameters():
            layers.split(name, parameter)
        for module in experts.found(one).values():
            each = one.config.num_experts // RANKS
            experts.keep(module, range(rank * each, (rank + 1) * each))
        found.append((layers, one))
    return found


def trained(base: Any) -> Adapter:
    adapter = lora.new_adapter(base, LoraSpec(rank=4, seed=1))
    for pair in adapter.pairs.values():
        pair.b.data.normal_(0.0, 0.2)
    return adapter


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_the_parts_of_a_linear_with_their_parts_of_an_adapter_make_the_whole(case: str) -> None:
    biased = {"attention_bias": True, "mlp_bias": True} if case == "llama" else {}
    whole, own = model(case, **biased), parts(case, **biased)
    adapter = trained(whole)
    adapters = [layers.own(adapter) for layers, _ in own]
    for one in (whole, *(part for _, part in own)):
        lora.wrap(one)
    for path in (path for path in adapter.pairs if path != "lm_head"):
        linear = whole.get_submodule(path)
        x = torch.randn(6, linear.base.in_features)
        wanted = output(linear, x, adapter)
        linears = [part.get_submodule(path) for _, part in own]
        if path.endswith(("o_proj", "down_proj")):
            shares = zip(linears, x.chunk(RANKS, 1), adapters, strict=True)
            found = sum((output(*share) for share in shares), torch.zeros(()))
        else:
            found = torch.cat([output(part, x, one) for part, one in zip(linears, adapters, strict=True)], 1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def output(linear: nn.Module, x: Tensor, adapter: Adapter) -> Tensor:
    with lora.use([(adapter, 1)]):
        return linear(x)


@pytest.fixture
def uncomputed_is_nan() -> Iterator[None]:
    """Memory that nobody writes holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uncomputed_is_nan")
@pytest.mark.parametrize("chosen", [[[0, 1], [2, 3], [1, 2]], [[0, 1], [1, 0], [0, 1]]])
def test_experts_of_another_rank_count_for_nothing(chosen: list[list[int]]) -> None:
    """Also where one rank has no row at all."""
    whole, own = model("qwen3-moe"), parts("qwen3-moe")
    adapter = trained(whole)
    numbers, weights = torch.tensor(chosen), torch.rand(3, 2)
    hidden = torch.randn(3, 64)
    wanted = routed(whole, adapter, adapter, hidden, numbers, weights)
    found = [routed(part, layers.own(adapter), adapter, hidden, numbers, weights) for layers, part in own]
    for one, *other in zip(wanted, *found, strict=True):
        torch.testing.assert_close(sum(other), one, atol=1e-4, rtol=1e-4)


def routed(one: Any, used: Adapter, adapter: Adapter, hidden: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    """The output of the first layer's experts under the adapter `used`, and the gradients of hidden states, weights and
    all of `adapter`'s pairs there."""
    lora.wrap(one)
    path = "model.layers.0.mlp.experts"
    inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    pairs = [pair for name, pair in adapter.pairs.items() if experts.module_path(name) == path]
    assert len(pairs) == 2
    with lora.use([(used, 3)]):
        result = one.get_submodule(path)(inputs[0], chosen, inputs[1])
    sloped = (result * torch.arange(64)).sum()
    return [result, *torch.autograd.grad(sloped, [*inputs, *(each for pair in pairs for each in (pair.a, pair.b))])]

"""A backward pass leaves a layer once all gradients of its weights are there, in every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.settings import TrainerSettings
from tests.parity import architectures
from workers.backends.training.engine import HiddenStates

LENGTHS = (17, 5, 5)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("case", architectures.CASES)
def test_a_layer_that_is_left_has_all_of_its_gradients(case: str, again: bool) -> None:
    model = random_model(case)
    left = left_layers(model, activation_checkpointing=again)
    used = [layer for layer in model.modules() if isinstance(layer, type(left[0][0])) and gradients(layer)]
    assert [layer for layer, _ in left] == used[::-1]
    for layer, found in left:
        torch.testing.assert_close(found, gradients(layer), rtol=0, atol=0)


def test_a_layer_that_runs_twice_is_left_after_both() -> None:
    model = random_model("llama", num_hidden_layers=3)
    first, second, _ = model.model.layers
    model.model.layers[2] = first
    left = left_layers(model, activation_checkpointing=False)
    assert [layer for layer, _ in left] == [second, first]
    torch.testing.assert_close(left[1][1], gradients(first), rtol=0, atol=0)


def test_a_layer_that_first_runs_without_gradients_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", num_hidden_layers=2)
    forward = model.model.forward

    def after_a_look(*args: Any, **named: Any) -> Any:
        with torch.no_grad():
            forward(*args, **named)
        return forward(*args, **named)

    monkeypatch.setattr(model.model, "forward", after_a_look)
    left = left_layers(model, activation_checkpointing=False)
    assert [layer for layer, _ in left] == [*reversed(model.model.layers)]


def random_model(case: str, **shape: Any) -> Any:
    config = architectures.config_of(case, **shape)
    torch.manual_seed(0)
    return architectures.auto_class(type(config)).from_config(config, dtype=torch.float32).eval()


def left_layers(model: Any, **trainer: Any) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Layers as a backward pass leaves them, each with the gradients that it has then."""
    left: list[tuple[nn.Module, dict[str, Tensor]]] = []
    hidden_states = HiddenStates(model, TrainerSettings(**trainer))
    hidden_states.on_layer_gradients = lambda layer: left.append((layer, gradients(layer)))
    tokens = torch.randint(0, architectures.VOCAB_SIZE, (sum(LENGTHS),))
    hidden_states(tokens, LENGTHS, [(None, len(LENGTHS))]).square().sum().backward()
    return left


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}

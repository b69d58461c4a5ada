"""Routers whose choice can be replayed, and models that are refused because theirs cannot. tests/parity shows that the
gradients are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from app.errors import UnservableModel
from app.settings import BaseModelSettings
from tests.parity import architectures
from workers.models import routers
from workers.models.routers import NO_ROUTE, Recorder


def settings_of(case: str, folder: Path) -> BaseModelSettings:
    return BaseModelSettings(name="tiny", path=str(architectures.build(case, folder)), router_replay=True)


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v3"])
def test_a_model_whose_layers_with_experts_all_have_known_routers_is_taken(case: str, tmp_path: Path) -> None:
    routers.check_replayable(settings_of(case, tmp_path))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("qwen3", r"'tiny' \(Qwen3ForCausalLM\) has no experts, so router_replay cannot be on; turn it off"),
        ("llama4", r"'tiny' \(Llama4ForCausalLM\) has routers of an unknown form, so router_replay cannot"),
    ],
)
def test_a_model_whose_routes_cannot_be_replayed_is_refused_in_one_line(case: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnservableModel, match=said) as caught:
        routers.check_replayable(settings_of(case, tmp_path))
    assert "\n" not in str(caught.value)


def test_a_router_of_such_a_name_and_another_form_is_not_known() -> None:
    shape = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = GraniteMoeConfig(**shape, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert any(type(module).__name__.endswith("TopKRouter") for module in model.modules())
    assert not routers.found(model)


def test_given_experts_are_taken_and_the_rest_is_chosen_to_the_bit_as_without_them() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architectures.config_of("qwen3-moe")).eval()
    tokens, recorder = torch.randint(3, 300, (1, 9)), Recorder()
    with torch.inference_mode():
        plain = model(tokens, use_cache=False).logits
        routers.wrap(model)
        with routers.use(recorder):
            assert torch.equal(model(tokens, use_cache=False).logits, plain)
        (own,) = recorder.take(1)
        assert (own.shape, own.dtype) == ((9, 2, 2), np.dtype("u1"))

        def chosen(given: np.ndarray) -> np.ndarray:
            found = []
            blocks = [layer.mlp.experts for layer in model.model.layers]
            hooks = [block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[1])) for block in blocks]
            with routers.use(Recorder(torch.from_numpy(given))):
                logits = model(tokens, use_cache=False).logits
            for hook in hooks:
                hook.remove()
            assert torch.equal(logits, plain) == (given == NO_ROUTE).all()
            return torch.stack(found, 1).numpy()

        free = np.full(own.shape, NO_ROUTE)
        assert np.array_equal(chosen(free), own)
        given = free.copy()
        given[4] = 3 - own[4].astype(np.int64)
        assert np.array_equal(chosen(given)[4], given[4])
        assert np.array_equal(chosen(given)[:4], own[:4])


def test_rows_behind_the_last_token_choose_by_themselves_and_count_for_no_expert() -> None:
    given, load = torch.tensor([[[2]], [[1]], [[0]]]), torch.zeros(2, 1, 4)
    with routers.Routing(given, torch.tensor([0, 1, 1]), load).used(slice(1, 5)):
        recorder = routers.in_use()
        assert recorder is not None and recorder.given is not None
        assert recorder.given.flatten().tolist() == [1, 0, NO_ROUTE, NO_ROUTE]
        recorder.note(0, torch.tensor([[1], [0], [3], [3]]), 4)
    assert load.tolist() == [[[0, 0, 0, 0]], [[1, 1, 0, 0]]]

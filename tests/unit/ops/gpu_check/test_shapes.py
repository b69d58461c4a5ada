"""Operations of a step of training, against torch's own count."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from ops.gpu_check import shapes

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def counted(layers: int, length: int) -> int:
    config = shapes.config("tiny")
    config.num_hidden_layers = layers
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=shapes.RANK, target_modules=LINEARS))
    model.enable_input_require_grads()  # else the first layer's base weights give no gradient to their inputs
    rows = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("layers", "length"), [(1, 24), (2, 24), (2, 40)])
def test_a_step_has_the_operations_that_torch_counts_but_for_masked_scores(layers: int, length: int) -> None:
    config = shapes.config("tiny")
    config.num_hidden_layers = layers
    masked = 6 * config.num_attention_heads * config.head_dim * layers * length**2
    assert shapes.step_flops(config, [length]) + masked == counted(layers, length)


def test_datums_do_not_attend_to_one_another() -> None:
    config = shapes.config("tiny")
    assert shapes.step_flops(config, [8, 8]) == 2 * shapes.step_flops(config, [8])


@pytest.mark.parametrize(("size", "billions"), [("0.6B", 0.6), ("4B", 4.0), ("8B", 8.2)])
def test_a_model_has_as_many_weights_of_two_bytes_as_its_name_says(size: str, billions: float) -> None:
    assert shapes.weight_bytes(size) / 2e9 == pytest.approx(billions, rel=0.01)

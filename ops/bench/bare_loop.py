"""The bare side of `real_step`: a training loop of transformers, PEFT and torch.optim.AdamW, without a service.

`python -m ops.bench.bare_loop MODEL_FOLDER`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from ops.bench import batches, real_step, side, timing

_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
MICRO_BATCH_ROWS = 4


def prepare() -> Callable[[int], dict[str, list[float]]]:
    """Returns measure(count): ms and loss (nats a token) of each step."""
    model = adapted(sys.argv[1])
    adamw = optimizer(model)
    tokens = torch.from_numpy(real_step.tokens(model.config.vocab_size)).long()
    micro_batches = torch.split(tokens, MICRO_BATCH_ROWS)

    def step(losses: list[float]) -> None:
        total = 0.0
        for rows in micro_batches:
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss / len(micro_batches)
            loss.backward()
            total += float(loss.detach())
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(total)

    def measure(count: int) -> dict[str, list[float]]:
        losses: list[float] = []
        return {"ms": [timing.timed_ms(lambda: step(losses)) for _ in range(count)], "loss": losses}

    return measure


def adapted(folder: str) -> Any:
    """Adds adapters in the base model's dtype: the faster of PEFT's two ways, and so the harder one to compare with."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    config = LoraConfig(r=real_step.RANK, lora_alpha=32, target_modules=_LINEARS)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    adapted = {
        name.rpartition(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name
    }
    assert adapted == set(_LINEARS), adapted
    return model.train()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the trained parameters, with the hyperparameters of the service's clients."""
    adam = batches.ADAM
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
    )


if __name__ == "__main__":
    side.serve(prepare)

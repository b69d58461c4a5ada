"""What training should compute, by transformers, the real PEFT and torch's AdamW alone.

Imports nothing of Tinsmith. It starts from a base folder and PEFT files, takes one datum at a time (no padding, no
batching, no shared pass), and writes the published formulas out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

Datum = Mapping[str, np.ndarray]


class Reference:
    """One adapter on one base, fp32, in the state its PEFT files hold; `dtype` float64 gives a yardstick for fp32."""

    def __init__(self, base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
        self.model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(dtype).eval()
        self.parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(self.parameters.values())

    def logprobs(self, datum: Datum) -> Tensor:
        """Of every target, in the shape of target_tokens."""
        logits = self.model(torch.from_numpy(datum["tokens"].astype(np.int64))[None]).logits[0]
        targets = torch.from_numpy(datum["target_tokens"])
        wide = targets if targets.ndim == 2 else targets[:, None]
        return torch.log_softmax(logits, -1).gather(-1, wide).view(targets.shape)

    def forward(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        with torch.no_grad():
            return [self.logprobs(datum).numpy() for datum in datums]

    def backward(self, datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None) -> float:
        """Add the summed loss's gradient to the parameters' `.grad`; returns the loss."""
        total = 0.0
        for datum in datums:
            value = loss(loss_fn, self.logprobs(datum), datum, config or {})
            value.backward()
            total += value.item()
        return total

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: p.grad.numpy().copy() for name, p in self.parameters.items() if p.grad is not None}

    def step(self, params: Mapping[str, float]) -> None:
        """`params`: the adam_params of an optim_step."""
        if params["grad_clip_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), params["grad_clip_norm"])
        self._adamw.param_groups[0].update(
            lr=params["learning_rate"],
            betas=(params["beta1"], params["beta2"]),
            eps=params["eps"],
            weight_decay=params["weight_decay"],
        )
        self._adamw.step()
        self._adamw.zero_grad()


def loss(name: str, lp: Tensor, datum: Datum, config: Mapping[str, float]) -> Tensor:
    """The summed loss of one datum."""
    given = {key: torch.from_numpy(value) for key, value in datum.items() if key not in ("tokens", "target_tokens")}
    if name == "cross_entropy":
        return -(given["weights"] * lp).sum()
    q, a = given["logprobs"], given["advantages"]
    ratio = torch.exp(lp - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * lp * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * config.get("beta", 0.05) * (lp - q) ** 2).sum()
    raise KeyError(name)


def relative_error(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The greatest |found - expected| / |expected| over the tensors, in L2 norms."""
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - expected[name]) / max(np.linalg.norm(expected[name]), 1e-30))
        for name in expected
    )

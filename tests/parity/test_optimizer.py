"""The optimizer alone, on given gradients, against torch.optim.AdamW with clip_grad_norm_."""

from __future__ import annotations

import torch
from torch import nn

from app.domain.ops import AdamParams
from workers.backends.training.optimizer import ShardedAdamW, Step, step_all
from workers.backends.training.ranks import RankGroup, Shards

SCHEDULE = (
    AdamParams(learning_rate=1e-2, eps=1e-8),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.3),
    AdamParams(learning_rate=1e-2, eps=1e-12, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=1e9),
)


def test_the_optimizer_equals_torch_adamw_on_the_same_gradients() -> None:
    torch.manual_seed(0)
    shapes = {"a": (4, 33), "b": (17, 4), "c": (5,)}
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    sizes = {name: p.numel() for name, p in ours.items()}
    optimizer = ShardedAdamW(ours, Shards.of(sizes, RankGroup(), torch.device("cpu"), split=False))
    adamw = torch.optim.AdamW(theirs, foreach=False, fused=False)
    for params in SCHEDULE:
        gradients = [torch.randn_like(p, requires_grad=False) for p in theirs]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        (norm,) = step_all([Step(optimizer, ours, dict(zip(ours, gradients, strict=True)), params)])
        torch_norm = torch.nn.utils.clip_grad_norm_(theirs, params.grad_clip_norm or float("inf"))
        adamw.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        adamw.step()
        torch.testing.assert_close(torch.tensor(norm), torch_norm, rtol=1e-6, atol=0)
        for mine, wanted in zip(ours.values(), theirs, strict=True):
            assert (mine - wanted).norm() <= 1e-6 * wanted.norm()

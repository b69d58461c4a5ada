"""The formulas against numbers worked out by hand; tests/parity/ has them against an independent implementation."""

from __future__ import annotations

import pytest
import torch

from app.domain.losses import LOSSES
from workers.training.losses import LOSS_FNS, LossValue

# Ratios 0.5, 1 and 2 on tokens with advantages 1, -1 and -3, then a prompt token with none.
LP = [-2.0 - 0.6931472, -1.0, -1.0 + 0.6931472, -4.0]
INPUTS = {"logprobs": torch.tensor([-2.0, -1.0, -1.0, 0.0]), "advantages": torch.tensor([1.0, -1.0, -3.0, 0.0])}


def value(name: str, **config: float) -> tuple[LossValue, torch.Tensor]:
    """The loss and its gradient in the logprobs."""
    lp = torch.tensor(LP, requires_grad=True)
    found = LOSS_FNS[name](lp, INPUTS, {**LOSSES[name].config, **config})
    (gradient,) = torch.autograd.grad(found.per_token.sum(), lp)
    return found, gradient


def close(found: torch.Tensor, *wanted: float) -> None:
    torch.testing.assert_close(found.detach(), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_every_known_loss_has_a_formula() -> None:
    assert LOSS_FNS.keys() == LOSSES.keys()


def test_cross_entropy_takes_any_weight_and_none() -> None:
    lp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weights = torch.tensor([[1.0, -0.5], [0.0, 2.0]])
    close(LOSS_FNS["cross_entropy"](lp, {"weights": weights}, {}).per_token.flatten(), 1.0, -1.0, 0.0, 8.0)
    close(LOSS_FNS["cross_entropy"](lp, {}, {}).per_token.flatten(), 1.0, 2.0, 3.0, 4.0)


def test_importance_sampling_weighs_advantages_by_the_ratio() -> None:
    found, gradient = value("importance_sampling")
    close(found.per_token, -0.5, 1.0, 6.0, 0.0)
    close(gradient, -0.5, 1.0, 6.0, 0.0)


def test_ppo_stops_the_gradient_only_where_clipping_is_the_worse_side() -> None:
    found, gradient = value("ppo")
    close(found.per_token, -0.5, 1.0, 6.0, 0.0)
    close(gradient, -0.5, 1.0, 6.0, 0.0)
    opposite = {**INPUTS, "advantages": -INPUTS["advantages"]}
    lp = torch.tensor(LP, requires_grad=True)
    clipped = LOSS_FNS["ppo"](lp, opposite, LOSSES["ppo"].config)
    close(clipped.per_token, 0.8, -1.0, -3.6, 0.0)
    close(torch.autograd.grad(clipped.per_token.sum(), lp)[0], 0.0, -1.0, 0.0, 0.0)


def test_cispo_keeps_a_gradient_of_the_clipped_ratio() -> None:
    found, gradient = value("cispo")
    close(found.per_token, -0.8 * LP[0], LP[1], 3.6 * LP[2], 0.0)
    close(gradient, -0.8, 1.0, 3.6, 0.0)


def test_dro_pulls_every_token_back() -> None:
    found, gradient = value("dro", beta=0.5)
    pull = [0.25 * 0.6931472**2, 0.0, 0.25 * 0.6931472**2, 0.25 * 16.0]
    close(found.per_token, pull[0] - LP[0], LP[1], pull[2] + 3 * LP[2], pull[3])
    close(gradient, -0.5 * 0.6931472 - 1.0, 1.0, 0.5 * 0.6931472 + 3.0, -2.0)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_metrics_leave_the_prompt_out(name: str) -> None:
    metrics = value(name)[0].metrics
    assert metrics["ratio:max"].amax().item() == pytest.approx(2.0)
    assert metrics["kl:sum"].sum().item() == pytest.approx(0.0, abs=1e-6)
    if name in ("ppo", "cispo"):
        assert metrics["clipped:sum"].sum().item() == 2.0

"""Loss formulas against numbers worked out by hand. tests/parity/ compares them with an independent implementation."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from app.domain.losses import CUSTOM, LOSSES
from workers.backends.training.losses import LOSS_FNS
from workers.backends.training.losses.formulas import LossValue

POLICY = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
LN2 = 0.6931472
DOCUMENT = Path(__file__).parents[6] / "docs" / "losses.md"


def column(*values: float) -> torch.Tensor:
    """[1, L, 1]"""
    return torch.tensor(values).view(1, -1, 1)


# Ratios 0.5, 1 and 2 on tokens with advantages 1, -1 and -3, then a prompt token with none.
LP = [-2.0 - LN2, -1.0, -1.0 + LN2, -4.0]
# The geometric mean of gspo is over the last two sampled tokens: the root of 2.
INPUTS = {
    "logprobs": column(-2.0, -1.0, -1.0, 0.0),
    "advantages": column(1.0, -1.0, -3.0, 0.0),
    "sequence_ratio_mask": column(0.0, 1.0, 1.0, 0.0),
}


def value(name: str, changed: dict[str, torch.Tensor] | None = None, **config: float) -> tuple[LossValue, torch.Tensor]:
    """Returns the loss and its gradient in the logprobs."""
    lp = column(*LP).requires_grad_()
    found = LOSS_FNS[name](lp, {**INPUTS, **(changed or {})}, {**LOSSES[name].config, **config})
    (gradient,) = torch.autograd.grad(found.per_token.sum(), lp)
    return found, gradient


def close(found: torch.Tensor, *wanted: float) -> None:
    torch.testing.assert_close(found.detach(), column(*wanted), rtol=1e-5, atol=1e-6)


def test_every_known_loss_has_a_formula() -> None:
    assert LOSS_FNS.keys() == LOSSES.keys() - {CUSTOM}


def test_every_loss_of_this_server_has_a_row_in_the_document() -> None:
    table = DOCUMENT.read_text().partition("|---")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(rows) == sorted(LOSSES.keys() - {CUSTOM}), "change the table in docs/losses.md"


def test_cross_entropy_takes_any_weight_and_none() -> None:
    lp = torch.tensor([[[-1.0, -2.0], [-3.0, -4.0]]])
    weights = torch.tensor([[[1.0, -0.5], [0.0, 2.0]]])
    assert LOSS_FNS["cross_entropy"](lp, {"weights": weights}, {}).per_token.flatten().tolist() == [1.0, -1.0, 0.0, 8.0]
    assert LOSS_FNS["cross_entropy"](lp, {}, {}).per_token.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_position_with_any_weight_is_one_token_of_cross_entropy() -> None:
    weights = torch.tensor([[[1.0, -0.5], [0.0, 2.0], [0.0, 0.0]]])
    own = LOSS_FNS["cross_entropy"](torch.zeros(1, 3, 2), {"weights": weights}, {}).own
    assert own is not None
    assert own.tolist() == [[[True], [True], [False]]]


def test_importance_sampling_weighs_advantages_by_the_ratio() -> None:
    found, gradient = value("importance_sampling")
    close(found.per_token, -0.5, 1.0, 6.0, 0.0)
    close(gradient, -0.5, 1.0, 6.0, 0.0)


def test_ppo_stops_the_gradient_only_where_clipping_is_the_worse_side() -> None:
    found, gradient = value("ppo")
    close(found.per_token, -0.5, 1.0, 6.0, 0.0)
    close(gradient, -0.5, 1.0, 6.0, 0.0)
    found, gradient = value("ppo", {"advantages": -INPUTS["advantages"]})
    close(found.per_token, 0.8, -1.0, -3.6, 0.0)
    close(gradient, 0.0, -1.0, 0.0, 0.0)


def test_cispo_keeps_a_gradient_of_the_clipped_ratio() -> None:
    found, gradient = value("cispo")
    close(found.per_token, -0.8 * LP[0], LP[1], 3.6 * LP[2], 0.0)
    close(gradient, -0.8, 1.0, 3.6, 0.0)


def test_dro_pulls_every_token_back() -> None:
    found, gradient = value("dro", beta=0.5)
    pull = [0.25 * LN2**2, 0.0, 0.25 * LN2**2, 0.25 * 16.0]
    close(found.per_token, pull[0] - LP[0], LP[1], pull[2] + 3 * LP[2], pull[3])
    close(gradient, -0.5 * LN2 - 1.0, 1.0, 0.5 * LN2 + 3.0, -2.0)


def test_gspo_gives_every_token_the_sequence_ratio_and_its_own_gradient() -> None:
    s = math.sqrt(2)
    found, gradient = value("gspo", clip_high_threshold=1.3)
    close(found.per_token, -1.3, s, 3 * s, 0.0)
    close(gradient, 0.0, s, 3 * s, 0.0)


def test_gspo_clips_at_the_range_of_its_paper() -> None:
    found, gradient = value("gspo", {"advantages": -INPUTS["advantages"]})
    close(found.per_token, math.sqrt(2), -1.0004, -3 * 1.0004, 0.0)
    close(gradient, math.sqrt(2), 0.0, 0.0, 0.0)


def test_any_value_but_zero_marks_a_token_for_the_sequence_ratio() -> None:
    odd, _ = value("gspo", {"sequence_ratio_mask": column(0.0, -2.0, 0.25, 0.0)})
    plain, _ = value("gspo")
    assert torch.equal(odd.per_token, plain.per_token)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_token_with_thresholds_of_its_own_is_clipped_by_them(name: str) -> None:
    ratios = [math.sqrt(2)] * 3 if name == "gspo" else [0.5, 1.0, 2.0]
    thresholds = {"clip_low_threshold": column(0.6, 1.0, 0.1, 0.0), "clip_high_threshold": column(1.1, 5.0, 1.7, 0.0)}
    clipped = [min(max(r, low), high) for r, low, high in zip(ratios, (0.6, 1.0, 0.1), (1.1, 5.0, 1.7), strict=True)]
    found, _ = value(name, thresholds)
    advantages = INPUTS["advantages"].flatten().tolist()[:3]
    if name == "cispo":
        wanted = [-h * lp * a for h, lp, a in zip(clipped, LP, advantages, strict=False)]
    else:
        wanted = [-min(r * a, h * a) for r, h, a in zip(ratios, clipped, advantages, strict=True)]
    close(found.per_token, *wanted, 0.0)
    assert found.metrics["clipped:sum"].sum() == sum(
        h != pytest.approx(r) for r, h in zip(ratios, clipped, strict=True)
    )
    # A config with only one of the two thresholds keeps the setting's other one.
    alone, _ = value(name, {"clip_low_threshold": column(0.0, 0.0, 0.0, 0.0)}, clip_high_threshold=1.1)
    assert alone.metrics["clipped:sum"].sum() == sum(r > 1.1 for r in ratios)


@pytest.mark.parametrize("name", POLICY)
def test_policy_metrics_leave_the_prompt_out(name: str) -> None:
    found, _ = value(name)
    ratios = [math.sqrt(2)] * 3 if name == "gspo" else [0.5, 1.0, 2.0]
    assert found.own is not None
    assert found.own.flatten().tolist() == [True, True, True, False]
    assert found.metrics["ratio:sum"].sum().item() == pytest.approx(sum(ratios))
    assert found.metrics["ratio:max"].amax().item() == pytest.approx(max(ratios))
    assert found.metrics["ratio:min"].amin().item() == pytest.approx(min(ratios))
    assert found.metrics["kl:sum"].flatten().tolist() == pytest.approx([LN2, 0.0, -LN2, 0.0], abs=1e-6)
    if name in ("ppo", "cispo", "gspo"):
        assert found.metrics["clipped:sum"].sum().item() == (3.0 if name == "gspo" else 2.0)


# Values 0.5, 0.5, -1 and 7 against old ones 0, 0.4, -1 and 0; the last token has no weight.
CRITIC = {
    "values": column(0.0, 0.4, -1.0, 0.0),
    "returns": column(2.0, 1.0, -3.0, 0.0),
    "weights": column(1.0, 1.0, 0.5, 0.0),
}


def valued(inputs: dict[str, torch.Tensor], clip: float = 0.2) -> tuple[LossValue, torch.Tensor]:
    values = column(0.5, 0.5, -1.0, 7.0).requires_grad_()
    found = LOSS_FNS["ppo_critic"](values, inputs, {"value_clip": clip})
    (gradient,) = torch.autograd.grad(found.per_token.sum(), values)
    return found, gradient


def test_ppo_critic_pulls_values_to_their_returns_unless_clipping_is_the_worse_side() -> None:
    found, gradient = valued(CRITIC)
    close(found.per_token, 0.5 * 1.8**2, 0.5 * 0.5**2, 0.25 * 2.0**2, 0.0)
    close(gradient, 0.0, -0.5, 1.0, 0.0)


def test_a_wide_clip_leaves_the_plain_squared_error() -> None:
    found, gradient = valued(CRITIC, clip=100.0)
    close(found.per_token, 0.5 * 1.5**2, 0.5 * 0.5**2, 0.25 * 2.0**2, 0.0)
    close(gradient, -1.5, -0.5, 1.0, 0.0)


def test_critic_metrics_are_over_tokens_with_a_weight_and_give_the_explained_variance() -> None:
    found, _ = valued(CRITIC)
    assert found.own is not None
    assert found.own.flatten().tolist() == [True, True, True, False]
    got = {name: (t.amax() if name.endswith(":max") else t.sum()).item() for name, t in found.metrics.items()}
    assert got == pytest.approx(
        {
            "value:sum": 0.0,
            "return:sum": 0.0,
            "squared_return:sum": 14.0,
            "squared_error:sum": 1.5**2 + 0.5**2 + 2.0**2,
            "error:max": 2.0,
            "clipped:sum": 1.0,
        }
    )
    values, returns = torch.tensor([0.5, 0.5, -1.0]), torch.tensor([2.0, 1.0, -3.0])
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    n, e = 3, got["return:sum"] - got["value:sum"]
    spread = got["squared_return:sum"] - got["return:sum"] ** 2 / n
    assert 1 - (got["squared_error:sum"] - e**2 / n) / spread == pytest.approx(explained.item(), rel=1e-5)


def test_values_alone_have_no_loss() -> None:
    found, gradient = valued({})
    close(found.per_token, 0.0, 0.0, 0.0, 0.0)
    assert not gradient.any()
    assert all(not metric.any() for metric in found.metrics.values())

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.domain.losses import LOSSES
from app.domain.ops import Batch, ForwardBackward, Ragged
from workers.backends.training.batch_ops import Evaluation, evaluate
from workers.backends.training.losses import LOSS_FNS

LENGTHS, LONGEST = (2, 5, 1), 5


def op(loss_fn: str) -> ForwardBackward:
    return ForwardBackward(Batch(Ragged.of([], "i4"), {}), loss_fn, {"entropy": 1.0})


def inputs_of(loss_fn: str, n: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs of one datum: every input but the targets, which a formula does not see."""
    spec = LOSSES[loss_fn]
    names = [name for name in (*spec.inputs, *spec.optional) if name != "target_tokens"]
    found = {name: torch.randn(1, n, width, generator=generator) for name in names}
    if "sequence_ratio_mask" in found:
        found["sequence_ratio_mask"][:, 1:] = 0.0
    return found


def padded(tensor: Tensor, value: float = 0.0) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, LONGEST - tensor.shape[1]), value=value)


@pytest.mark.parametrize(
    ("loss_fn", "weighted", "width"),
    [*((name, True, 1) for name in LOSS_FNS), ("cross_entropy", True, 3), ("cross_entropy", False, 2)],
)
def test_padding_counts_for_nothing(loss_fn: str, weighted: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = [torch.randn(1, n, width, generator=generator) - 2 for n in LENGTHS]
    entropies = [torch.rand(1, n, 1, generator=generator) for n in LENGTHS]
    inputs = [inputs_of(loss_fn, n, width, generator) if weighted else {} for n in LENGTHS]
    alone = [
        evaluate(op(loss_fn), lp, given, torch.ones_like(lp).bool(), entropy)
        for lp, given, entropy in zip(logprobs, inputs, entropies, strict=True)
    ]
    together = evaluate(
        op(loss_fn),
        torch.cat([padded(lp, -7.0) for lp in logprobs]),
        {name: torch.cat([padded(given[name]) for given in inputs]) for name in inputs[0]},
        torch.cat([padded(torch.ones_like(lp)).bool() for lp in logprobs]),
        torch.cat([padded(entropy, 3.0) for entropy in entropies]),
    )
    same(together, alone)


def same(together: Evaluation, alone: list[Evaluation]) -> None:
    torch.testing.assert_close(together.losses, torch.cat([one.losses for one in alone]))
    torch.testing.assert_close(together.gradient, torch.cat([padded(one.gradient) for one in alone]))
    for name, values in together.metrics.items():
        torch.testing.assert_close(values, torch.cat([one.metrics[name] for one in alone]), msg=name)

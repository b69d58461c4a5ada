"""Logprobs of samples under a grammar, for both of vLLM's samplers. tests/conformance shows it on a CPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from workers.backends.sampling.vllm.patches import _mask_a_copy, _mask_behind_logprobs

INF = float("inf")


def logits() -> Tensor:
    return torch.tensor([[2.0, 1.0, 0.0]])


def forbid(logits: Tensor, *allowed: int) -> None:
    """A grammar that allows these tokens."""
    logits[:, [token for token in range(3) if token not in allowed]] = -INF


def test_the_first_sampler_masks_after_the_logprobs():
    runner = SimpleNamespace(apply_grammar_bitmask=lambda scheduled, grammar, batch, logits: forbid(logits, grammar))

    class Sampler:
        @staticmethod
        def compute_logprobs(logits: Tensor) -> Tensor:
            return logits.log_softmax(-1)

    _mask_behind_logprobs(runner, Sampler)
    rows = logits()
    runner.apply_grammar_bitmask(None, 2, None, rows)
    assert torch.equal(Sampler().compute_logprobs(rows), logits().log_softmax(-1))
    assert rows.tolist() == [[-INF, -INF, 0.0]]


def test_the_second_sampler_masks_a_copy():
    class Worker:
        def apply_grammar_bitmask(self, logits: Tensor, batch: Any, ids: list[str], mask: Any) -> None:
            forbid(logits, mask)

    class Sampler:
        def sample(self, logits: Tensor, *, scale: float) -> tuple[int, Tensor]:
            return int((logits * scale).argmax()), logits

    _mask_a_copy(Worker, Sampler)
    rows = logits()
    Worker().apply_grammar_bitmask(rows, None, ["a"], 2)
    assert Sampler().sample(rows, scale=1.0)[0] == 2
    assert torch.equal(rows, logits()), "the logprobs are computed from these"
    assert Sampler().sample(rows, scale=1.0)[0] == 0, "the next step has no grammar"

from __future__ import annotations

import pytest
import torch

from workers.training import logprobs
from workers.training.logprobs import token_entropy, token_logprobs


@pytest.mark.parametrize("chunk_elements", [1, 100, 2**22])
def test_logprobs_and_their_gradient_equal_log_softmax(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 50, dtype=torch.float32).mul(5).requires_grad_()
    targets = torch.randint(0, 50, (2, 7, 3))
    targets[..., 1] = targets[..., 0]
    seed = torch.randn(2, 7, 3)
    found = token_logprobs(logits, targets)
    (gradient,) = torch.autograd.grad(found, logits, seed)
    wanted = torch.log_softmax(logits.double(), -1).gather(-1, targets)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits, seed.double())
    torch.testing.assert_close(found, wanted.float())
    torch.testing.assert_close(gradient, wanted_gradient)


def test_bfloat16_logits_are_reduced_in_fp32() -> None:
    logits = torch.randn(1, 5, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.randint(0, 4096, (1, 5, 1))
    found = token_logprobs(logits, targets)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.log_softmax(logits.float(), -1).gather(-1, targets))


def test_the_logits_themselves_are_left_alone() -> None:
    logits = torch.randn(1, 5, 16).requires_grad_()
    before = logits.detach().clone()
    token_logprobs(logits, torch.zeros(1, 5, 1, dtype=torch.int64)).sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk_elements", [1, 100, 2**22])
def test_entropy_is_that_of_the_whole_distribution(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    logits = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0)).mul(5)
    for given in (logits, logits.bfloat16()):
        wanted = torch.distributions.Categorical(logits=given.double()).entropy()
        torch.testing.assert_close(token_entropy(given)[..., 0], wanted.float())


def test_an_entropy_without_choice_is_zero() -> None:
    certain = torch.tensor([[[0.0, -torch.inf, -torch.inf], [300.0, 0.0, -300.0]]])
    assert token_entropy(certain).flatten().tolist() == [0.0, 0.0]

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.domain.sampling import SampleRequest
from workers.backends.sampling.token_sampler import TokenSampler, token_logprobs

CPU = torch.device("cpu")


def ask(**fields) -> SampleRequest:
    return SampleRequest(np.array([1], np.int32), 1, 1, 0, **fields)


def draw(logits: torch.Tensor, uniforms: list[float], **fields) -> list[int]:
    token_sampler = TokenSampler([ask(**fields)] * len(uniforms), CPU)
    tokens, _ = token_sampler.sample(logits.expand(len(uniforms), -1), torch.tensor(uniforms, dtype=torch.float64))
    return tokens.tolist()


EVEN = (torch.arange(20_000) + 0.5) / 20_000
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        ({"temperature": 1e-50}, [0, 1, 0, 0]),
        ({"temperature": 1e-50, "top_k": 3}, [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_the_odds_that_temperature_top_k_and_top_p_leave(fields, expected):
    counts = np.bincount(draw(LOGITS, EVEN.tolist(), **fields), minlength=4)
    np.testing.assert_allclose(counts / len(EVEN), expected, atol=1e-3)


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    requests = [ask(temperature=0.0), ask(top_k=5), ask()]
    uniforms = torch.tensor([0.2, 0.6, 0.9], dtype=torch.float64)
    together = TokenSampler(requests, CPU).sample(logits, uniforms)[0].tolist()
    alone = [
        TokenSampler([r], CPU).sample(logits[i : i + 1], uniforms[i : i + 1])[0].item() for i, r in enumerate(requests)
    ]
    assert together == alone


def test_an_impossible_token_is_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert set(draw(logits, [0.0, 0.25, 0.5, 0.75, 1 - 2**-53])) == {1, 3}


def test_the_odds_hold_across_a_vocabulary_of_many_blocks():
    """1,000 tokens are four blocks: one of them has no weight and the last is not full."""
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    weights[256:512] = 0
    counts = np.bincount(draw(weights.log(), EVEN.tolist()), minlength=1000)
    cumulated = counts.cumsum() / len(EVEN)
    np.testing.assert_allclose(cumulated, (weights.cumsum(0) / weights.sum()).numpy(), atol=2 / len(EVEN))
    assert counts[256:512].sum() == 0


def test_rounding_draws_nothing_impossible_either():
    """The greatest possible uniform number, times a sum, often equals that sum."""
    weights = torch.rand(1000, 700, generator=torch.Generator().manual_seed(0))
    weights[:, 400:] = 0
    token_sampler = TokenSampler([ask()] * len(weights), CPU)
    tokens, _ = token_sampler.sample(weights.log(), torch.full((len(weights),), 1 - 2**-53, dtype=torch.float64))
    assert (tokens < 400).all()


def test_the_logprob_is_the_models_own_before_temperature_and_cuts():
    token_sampler = TokenSampler([ask(temperature=0.1, top_k=1)], CPU)
    tokens, logprobs = token_sampler.sample(LOGITS[None] + 7, torch.tensor([0.5], dtype=torch.float64))
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(np.log(0.4), abs=1e-6)


def test_nan_logits_give_a_nan_logprob_for_their_row_alone():
    logits = torch.stack([LOGITS, LOGITS * torch.nan])
    uniforms = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for fields in ({}, {"top_k": 2}, {"temperature": 0.0}):
        tokens, logprobs = TokenSampler([ask(**fields)] * 2, CPU).sample(logits, uniforms)
        assert logprobs.isnan().tolist() == [False, True]
        assert 0 <= tokens[1] < 4


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.randn(1, 1000).bfloat16()
    exact = logits.double().log_softmax(-1)[0, 3].item()
    assert token_logprobs(logits, torch.tensor([3])).item() == pytest.approx(exact, abs=1e-5)

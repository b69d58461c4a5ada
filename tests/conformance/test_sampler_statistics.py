"""Token sampling of both samplers against the requested distribution: chi-square, on a vocabulary of 320."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.samplers import PROMPTS, ask, tokens_of

DRAWS = 1024
SHAPES: dict[str, dict[str, Any]] = {
    "as the model has it": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "the 5 likeliest": {"top_k": 5},
    "the likeliest 80 %": {"top_p": 0.8},
    "all three": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


def expected(logprobs: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Expected probabilities, float64 [V]: after temperature, then top_k, then the smallest set that reaches top_p."""
    odds = torch.softmax(logprobs.double() / temperature, 0).numpy()
    order = np.argsort(-odds)
    if top_k:
        odds[order[top_k:]] = 0
        odds /= odds.sum()
    kept = np.searchsorted(np.cumsum(odds[order]), top_p) + 1
    odds[order[kept:]] = 0
    result: np.ndarray = odds / odds.sum()
    return result


def deviation(tokens: list[int], odds: np.ndarray) -> float:
    """Pearson's chi-square of the counts, as standard deviations from its mean (Wilson and Hilferty's cube root).

    Tokens are in order of their odds. From the token where all the remaining ones together expect fewer than 5, they
    are counted as one.
    """
    counts = np.bincount(tokens, minlength=len(odds))
    assert not counts[odds == 0].any(), "a token was drawn that had been cut"
    order = np.argsort(-odds)
    wanted, seen = odds[order] * len(tokens), counts[order]
    whole = int(min((wanted >= 5).sum(), (np.cumsum(wanted[::-1])[::-1] >= 5).sum() - 1))
    wanted, seen = (np.append(numbers[:whole], numbers[whole:].sum()) for numbers in (wanted, seen))
    freedom = len(wanted) - 1
    square = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    return ((square / freedom) ** (1 / 3) - (1 - spread)) / sqrt(spread)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_follow_the_distribution_that_temperature_top_k_and_top_p_describe(sampler, reference, shape):
    request = ask(PROMPTS[1], num_samples=DRAWS, max_tokens=1, seed=3, **SHAPES[shape])
    tokens = [token for (token,) in tokens_of(sampler.sample(None, request))]
    logprobs = reference.table(None, PROMPTS[1])[-1]
    assert deviation(tokens, expected(logprobs, **SHAPES[shape])) < 3
    for other in set(SHAPES) - {shape}:
        with_other = expected(logprobs, **SHAPES[other])
        assert not with_other[tokens].all() or deviation(tokens, with_other) > 3, (
            f"cannot be distinguished from {other}"
        )


def test_a_second_tokens_draws_follow_the_first(sampler, reference):
    """The streams of a call are independent of each other, and so are the draws within a stream."""
    request = ask(PROMPTS[1], num_samples=DRAWS, max_tokens=2, seed=4, top_k=2)
    pairs = [tuple(tokens) for tokens in tokens_of(sampler.sample(None, request))]
    odds = np.zeros(4)
    first = expected(reference.table(None, PROMPTS[1])[-1], top_k=2)
    places = {}
    for token in np.flatnonzero(first):
        second = expected(reference.table(None, np.append(PROMPTS[1], np.int32(token)))[-1], top_k=2)
        for follower in np.flatnonzero(second):
            odds[len(places)] = first[token] * second[follower]
            places[token, follower] = len(places)
    assert deviation([places[pair] for pair in pairs], odds) < 3


def test_alternatives_to_a_prompts_tokens_follow_the_model_at_the_requests_temperature(sampler, reference):
    request = ask(PROMPTS[0], max_tokens=1, prompt_alternatives=2000, temperature=0.7, top_k=1, seed=8)
    drawn = sampler.sample("one", request).prompt_alternatives
    table = reference.table("one", PROMPTS[0])
    for row, tokens in enumerate(drawn.tokens.tolist()):
        assert deviation(tokens, expected(table[row], temperature=0.7)) < 3.5  # the largest of four


def test_a_thousand_samples_of_a_call_differ_and_a_repeat_of_it_is_equal(sampler):
    request = ask(PROMPTS[1], num_samples=1000, max_tokens=5, seed=11)
    first, again = (tokens_of(sampler.sample(None, request)) for _ in range(2))
    assert len({tuple(tokens) for tokens in first}) == 1000
    assert again == first

"""Scores of prompts and of sampled positions (top tokens, alternatives, given ids), against transformers and PEFT."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from app.domain.sampling import UNSCORED, Cells, SampleOutput, TokenLogprobs
from tests.conformance.samplers import CONTEXT, PROMPTS, ask
from tests.models import VOCAB_SIZE
from workers.backends.sampling.base import SamplerBackend

LONG = np.random.default_rng(9).integers(0, 256, size=200).astype(np.int32)
EVERYTHING: dict[str, Any] = {"prompt_logprobs": True, "prompt_top": 3, "prompt_alternatives": 2, "sample_top": 4}


def scored(sampler: SamplerBackend, adapter: str | None, prompt: np.ndarray, **fields: Any) -> SampleOutput:
    return sampler.sample(adapter, ask(prompt, **{"max_tokens": 1, **fields}))


def dense(rows: list[list[int]]) -> Cells:
    ids = np.array(rows, np.int64)
    return Cells(ids.reshape(-1), np.arange(len(ids) + 1) * ids.shape[1], ids.shape[1])


def at(table: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
    """Looks up tokens [n, k] in a table of logprobs [n, V]; returns [n, k]."""
    return table.gather(1, torch.from_numpy(tokens.astype(np.int64)))


def check_top(found: TokenLogprobs, table: torch.Tensor, k: int) -> None:
    """Checks the k largest of each row of the table [n, V], and each logprob beside its token."""
    assert found.tokens.shape == found.logprobs.shape == (len(table), k)
    assert (found.tokens.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_allclose(found.logprobs, table.topk(k).values, atol=1e-3)
    np.testing.assert_allclose(
        table.gather(1, torch.from_numpy(found.tokens.astype(np.int64))), found.logprobs, atol=1e-3
    )
    assert all(len(set(row)) == k for row in found.tokens.tolist())


@pytest.mark.parametrize("adapter", [None, "two"])
@pytest.mark.parametrize("k", [1, 5, 100, VOCAB_SIZE])
def test_the_likeliest_tokens_of_a_prompt_are_the_models(sampler, reference, adapter, k):
    top = scored(sampler, adapter, PROMPTS[1], prompt_top=k).prompt_top
    assert (top.tokens[0].tolist(), top.logprobs[0].tolist()) == ([0] * k, [UNSCORED] * k)
    rest = TokenLogprobs(top.tokens[1:], top.logprobs[1:])
    check_top(rest, reference.table(adapter, PROMPTS[1])[:-1], k)


@pytest.mark.parametrize("k", [1, 100, VOCAB_SIZE])
def test_the_likeliest_tokens_at_a_samples_positions_are_the_models(sampler, reference, k):
    fields = {"num_samples": 3, "max_tokens": 6, "temperature": 0.7, "top_k": 50}
    for sequence in sampler.sample("one", ask(PROMPTS[1], sample_top=k, **fields)).sequences:
        whole = np.concatenate([PROMPTS[1], sequence.tokens])
        check_top(sequence.top, reference.table("one", whole)[-7:-1], k)


def test_requests_with_different_k_in_one_batch_get_each_their_own(sampler, reference):
    with ThreadPoolExecutor(6) as pool:
        asked = [ask(PROMPTS[1], sample_top=k, seed=k, num_samples=2) for k in (0, 1, 7, 2, 30, 3)]
        outputs = list(pool.map(lambda request: sampler.sample("two", request), asked))
    for request, output in zip(asked, outputs, strict=True):
        for sequence in output.sequences:
            assert (sequence.top is None) == (request.sample_top == 0)
            if sequence.top is not None:
                whole = np.concatenate([PROMPTS[1], sequence.tokens])
                check_top(sequence.top, reference.table("two", whole)[-13:-1], request.sample_top)


@pytest.mark.parametrize("prompt", [PROMPTS[1], LONG], ids=["40 tokens", "200 tokens"])
@pytest.mark.parametrize("last", [1, 17, 39])
def test_only_the_last_tokens_of_a_prompt_are_scored_when_asked_so(sampler, reference, prompt, last):
    for _ in range(2):  # for the second request the engine may have the prompt in its cache
        output = scored(sampler, "one", prompt, prompt_logprobs=True, prompt_last_n=last, prompt_top=2)
        assert np.isnan(output.prompt_logprobs[:-last]).all()
        np.testing.assert_allclose(output.prompt_logprobs[-last:], reference.logprobs("one", prompt)[-last:], atol=1e-3)
        assert (output.prompt_top.logprobs[:-last] == np.float32(UNSCORED)).all()
        rest = TokenLogprobs(output.prompt_top.tokens[-last:], output.prompt_top.logprobs[-last:])
        check_top(rest, reference.table("one", prompt)[-last - 1 : -1], 2)


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[3], LONG], ids=["5 tokens", "90 tokens", "200 tokens"])
def test_a_matrix_of_ids_gets_the_logprob_of_each_and_zero_where_none_is_asked_for(sampler, reference, prompt):
    ids = np.random.default_rng(1).integers(-1, VOCAB_SIZE, (len(prompt) - 1, 8))
    ids[: len(ids) // 2, 1:] = -1
    found = scored(sampler, "two", prompt, prompt_targets=dense(ids.tolist())).prompt_targets
    assert (found.values.dtype, found.width, found.columns) == (np.float32, 8, None)
    wanted = at(reference.table("two", prompt)[:-1], np.maximum(ids, 0)).numpy()
    np.testing.assert_allclose(found.values.reshape(ids.shape), np.where(ids < 0, 0, wanted), atol=1e-3)


def test_sparse_ids_come_back_in_their_own_layout(sampler, reference):
    starts = np.zeros(len(LONG), np.int64)
    starts[150:] = 3
    starts[199:] = 5
    cells = Cells(np.array([7, 300, 7, 0, 319]), starts, 1_000_000, np.array([5, 9, 999_999, 0, 1]))
    found = scored(sampler, None, LONG, prompt_targets=cells).prompt_targets
    assert (found.width, found.starts.tolist(), found.columns.tolist()) == (
        1_000_000,
        starts.tolist(),
        cells.columns.tolist(),
    )
    table = reference.table(None, LONG)
    wanted = [*table[149, [7, 300, 7]].tolist(), *table[198, [0, 319]].tolist()]
    np.testing.assert_allclose(found.values, wanted, atol=1e-3)


@pytest.mark.parametrize("adapter", [None, "one"])
def test_alternatives_are_the_models_tokens_with_their_logprobs_and_a_repeat_is_equal(sampler, reference, adapter):
    first, again = (scored(sampler, adapter, LONG, prompt_alternatives=3, seed=5).prompt_alternatives for _ in range(2))
    assert first.tokens.shape == (199, 3)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert len({tuple(column) for column in first.tokens.T.tolist()}) == 3
    np.testing.assert_allclose(first.logprobs, at(reference.table(adapter, LONG)[:-1], first.tokens), atol=1e-3)
    other = scored(sampler, adapter, LONG, prompt_alternatives=3, seed=6).prompt_alternatives
    assert first.tokens.tolist() != other.tokens.tolist()


def test_alternatives_at_temperature_zero_are_the_likeliest_tokens(sampler, reference):
    found = scored(sampler, "one", PROMPTS[3], prompt_alternatives=2, temperature=0.0).prompt_alternatives
    best = reference.table("one", PROMPTS[3])[:-1].argmax(-1)
    assert found.tokens.T.tolist() == [best.tolist()] * 2


def test_all_of_it_at_once_beside_other_requests_is_what_each_gives_alone(sampler, reference):
    targets = dense([[i % VOCAB_SIZE] for i in range(len(LONG) - 1)])
    asks = [
        (adapter, ask(prompt, **EVERYTHING, num_samples=3, prompt_targets=targets if prompt is LONG else None))
        for prompt in (LONG, *PROMPTS)
        for adapter in (None, "one", "two")
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        outputs = list(pool.map(lambda entry: sampler.sample(*entry), asks))
    for (adapter, request), output in zip(asks, outputs, strict=True):
        table = reference.table(adapter, request.prompt)[:-1]
        np.testing.assert_allclose(output.prompt_logprobs[1:], reference.logprobs(adapter, request.prompt), atol=1e-3)
        check_top(TokenLogprobs(output.prompt_top.tokens[1:], output.prompt_top.logprobs[1:]), table, 3)
        drawn = output.prompt_alternatives
        np.testing.assert_allclose(drawn.logprobs, at(table, drawn.tokens), atol=1e-3)
        if request.prompt_targets is not None:
            rows = range(len(table))
            wanted = table[rows, request.prompt_targets.values]
            np.testing.assert_allclose(output.prompt_targets.values, wanted, atol=1e-3)
        assert [sequence.top.tokens.shape for sequence in output.sequences] == [(12, 4)] * 3


def test_a_prompt_of_one_token_has_nothing_to_score(sampler):
    output = scored(sampler, "one", PROMPTS[2], **EVERYTHING)
    assert np.isnan(output.prompt_logprobs).tolist() == [True]
    assert output.prompt_top.logprobs.tolist() == [[UNSCORED] * 3]
    assert output.prompt_alternatives.tokens.shape == (0, 2)


FULL = np.random.default_rng(11).integers(0, 256, size=CONTEXT).astype(np.int32)


@pytest.mark.parametrize("adapter", [None, "two"])
def test_a_prompt_that_fills_the_context_is_scored_and_its_samples_are_empty(sampler, reference, adapter):
    """As long as a prompt with a sample that ran to the end of the context."""
    for last in (0, 10):
        output = scored(sampler, adapter, FULL, num_samples=2, prompt_last_n=last, **EVERYTHING)
        table = reference.table(adapter, FULL)[:-1]
        of = slice(-last, None) if last else slice(1, None)
        np.testing.assert_allclose(output.prompt_logprobs[of], reference.logprobs(adapter, FULL)[-last:], atol=1e-3)
        check_top(TokenLogprobs(output.prompt_top.tokens[of], output.prompt_top.logprobs[of]), table[-last:], 3)
        found = output.prompt_alternatives
        np.testing.assert_allclose(found.logprobs, at(table, found.tokens), atol=1e-3)
        for sequence in output.sequences:
            assert (len(sequence.tokens), len(sequence.logprobs), sequence.stopped) == (0, 0, False)


def test_a_prompt_that_fills_the_context_is_scored_beside_others(sampler, reference):
    requests = [ask(FULL, max_tokens=1, prompt_logprobs=True), ask(PROMPTS[3]), ask(FULL[1:], prompt_logprobs=True)]
    with ThreadPoolExecutor(3) as pool:
        full, other, shorter = pool.map(lambda request: sampler.sample("one", request), requests)
    np.testing.assert_allclose(full.prompt_logprobs[1:], reference.logprobs("one", FULL), atol=1e-3)
    np.testing.assert_allclose(shorter.prompt_logprobs[1:], reference.logprobs("one", FULL[1:]), atol=1e-3)
    assert [len(output.sequences[0].tokens) for output in (full, other, shorter)] == [0, 12, 1]


def test_what_the_cache_holds_of_a_prompt_is_said_and_changes_no_score(sampler, reference):
    prompt = np.random.default_rng(10).integers(0, 256, size=150).astype(np.int32)
    first, second = (sampler.sample("two", ask(prompt)) for _ in range(2))
    assert first.cached_tokens == 0
    if sampler.describe()["sampler"] == "VllmSampler":
        assert second.cached_tokens == 128  # four whole blocks of 32
    else:
        assert second.cached_tokens == 0
    assert second.sequences[0].tokens.tolist() == first.sequences[0].tokens.tolist()
    whole = scored(sampler, "two", prompt, prompt_logprobs=True)
    assert whole.cached_tokens == 0
    np.testing.assert_allclose(whole.prompt_logprobs[1:], reference.logprobs("two", prompt), atol=1e-3)
    other = scored(sampler, "one", prompt, prompt_logprobs=True, prompt_last_n=10)
    assert other.cached_tokens == 0  # of another adapter
    end = scored(sampler, "two", prompt, prompt_logprobs=True, prompt_last_n=10)
    assert end.cached_tokens == second.cached_tokens
    np.testing.assert_allclose(end.prompt_logprobs[-10:], reference.logprobs("two", prompt)[-10:], atol=1e-3)


def test_nothing_is_given_that_was_not_asked_for(sampler):
    output = sampler.sample(None, ask(PROMPTS[1]))
    assert (output.prompt_logprobs, output.prompt_top, output.prompt_targets) == (None, None, None)
    assert output.prompt_alternatives is None
    assert output.sequences[0].top is None

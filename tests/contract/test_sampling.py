"""The SDK's sampling calls against a running stack."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from app.stores.redis import keys
from tests.contract.awaiting import await_true, awaited
from tests.contract.data import datum, logprobs, sentences, train
from tests.contract.stack import BASE, Stack
from tests.models import VOCAB_SIZE

PROMPT = types.ModelInput.from_ints(sentences(1)[0])
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


@pytest.fixture
def sampling(training: tinker.TrainingClient) -> tinker.SamplingClient:
    train(training, 3)
    return training.save_weights_and_get_sampling_client().result()


def test_sampled_logprobs_are_the_trainers(training: tinker.TrainingClient, sampling: tinker.SamplingClient):
    params = types.SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, seed=5, stop=[])
    (sequence,) = sampling.sample(PROMPT, num_samples=1, sampling_params=params).result().sequences
    whole = PROMPT.to_ints() + list(sequence.tokens)
    scored = logprobs(training.forward([datum(whole)], "cross_entropy").result())
    start = len(PROMPT.to_ints()) - 1
    np.testing.assert_allclose(sequence.logprobs, scored[start : start + len(sequence.tokens)], atol=1e-3)


def test_prompt_logprobs_are_the_trainers(training: tinker.TrainingClient, sampling: tinker.SamplingClient):
    tokens = PROMPT.to_ints()
    scored = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    found = sampling.compute_logprobs(PROMPT).result()
    assert found[0] is None
    np.testing.assert_allclose(found[1:], scored[:-1], atol=1e-3)


def test_a_seed_repeats_and_the_samples_of_one_call_differ(sampling: tinker.SamplingClient):
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=17, stop=[])
    first, again = (sampling.sample(PROMPT, num_samples=4, sampling_params=params).result() for _ in range(2))
    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) == 4


def test_a_stop_token_ends_the_sample_and_is_part_of_it(sampling: tinker.SamplingClient):
    (free,) = sampling.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result().sequences
    stop = free.tokens[2]
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[stop])
    (cut,) = sampling.sample(PROMPT, num_samples=1, sampling_params=params).result().sequences
    assert list(cut.tokens) == list(free.tokens[: list(free.tokens).index(stop) + 1])
    assert (cut.stop_reason, free.stop_reason) == ("stop", "length")


def test_concurrent_requests_of_base_and_adapters_keep_apart(
    service: tinker.ServiceClient, training: tinker.TrainingClient, sampling: tinker.SamplingClient
):
    base = service.create_sampling_client(base_model=BASE).result()
    train(training, 3)
    newer = training.save_weights_and_get_sampling_client().result()
    clients = [base, sampling, newer]

    def greedy(client: tinker.SamplingClient) -> tuple[list[int], list[float]]:
        (sequence,) = client.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result().sequences
        return list(sequence.tokens), list(sequence.logprobs or [])

    alone = [greedy(client) for client in clients]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(greedy, clients * 4))
    for (tokens, scores), (expected, wanted) in zip(together, alone * 4, strict=True):
        assert tokens == expected
        np.testing.assert_allclose(scores, wanted, atol=1e-3)
    assert abs(alone[0][1][0] - alone[2][1][0]) > 1e-3


def test_a_saved_sampler_checkpoint_is_sampled_by_path(
    service: tinker.ServiceClient, training: tinker.TrainingClient, sampling: tinker.SamplingClient
):
    path = training.save_weights_for_sampler("final").result().path
    by_path = service.create_sampling_client(model_path=path).result()
    assert by_path.get_base_model() == BASE
    expected, found = (
        client.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result().sequences[0]
        for client in (sampling, by_path)
    )
    assert list(found.tokens) == list(expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


def test_everything_asample_can_ask_is_what_the_sdk_reads(
    training: tinker.TrainingClient, sampling: tinker.SamplingClient
):
    tokens = PROMPT.to_ints()
    ids = np.arange(2 * (len(tokens) - 1)).reshape(-1, 2) % 256
    ids[0] = -1
    answer = sampling.sample(
        PROMPT,
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=5, temperature=0.7, seed=3, stop=[]),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=3,
        topk_prompt_logprobs=VOCAB_SIZE,
        topk_sample_logprobs=VOCAB_SIZE,
        target_prompt_logprobs=types.TensorData.from_numpy(ids),
        prompt_alt_tokens_k=4,
    ).result()
    scored = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    assert answer.prompt_logprobs[:-3] == [None] * (len(tokens) - 3)
    np.testing.assert_allclose(answer.prompt_logprobs[-3:], scored[-4:-1], atol=1e-3)
    assert answer.topk_prompt_logprobs[:-3] == [None] * (len(tokens) - 3)
    for place in range(-3, 0):
        top = dict(answer.topk_prompt_logprobs[place])
        assert (len(top), list(top.values())) == (VOCAB_SIZE, sorted(top.values(), reverse=True))
        np.testing.assert_allclose(top[tokens[place]], answer.prompt_logprobs[place], atol=1e-3)
        for target, logprob in zip(ids[place], answer.target_prompt_logprobs.to_numpy()[place], strict=True):
            np.testing.assert_allclose(top[target], logprob, atol=1e-3)
    assert answer.target_prompt_logprobs.shape == [len(tokens) - 1, 2]
    assert answer.target_prompt_logprobs.to_numpy()[0].tolist() == [0, 0]
    assert answer.prompt_alt_tokens.tokens.shape == answer.prompt_alt_tokens.logprobs.shape == [len(tokens) - 1, 4]
    for sequence in answer.sequences:
        assert [len(top) for top in sequence.topk_logprobs] == [VOCAB_SIZE] * 5
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            np.testing.assert_allclose(dict(top)[token], logprob, atol=1e-3)


def test_sparse_targets_are_scored_as_the_trainer_scores_them(
    training: tinker.TrainingClient, sampling: tinker.SamplingClient
):
    tokens = PROMPT.to_ints()
    ids = torch.full((len(tokens) - 1, 6), -1, dtype=torch.int64)
    ids[2, 4], ids[-1, 0] = tokens[3], tokens[-1]
    target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    assert target.sparse_crow_indices is not None
    found = (
        sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=target)
        .result()
        .target_prompt_logprobs
    )
    scored = logprobs(training.forward([datum(tokens)], "cross_entropy").result())
    assert (found.sparse_crow_indices, found.sparse_col_indices) == (
        target.sparse_crow_indices,
        target.sparse_col_indices,
    )
    np.testing.assert_allclose(found.data, [scored[2], scored[len(tokens) - 2]], atol=1e-3)


def test_the_end_of_a_prompt_is_scored_alone_through_compute_logprobs(sampling: tinker.SamplingClient):
    whole, end = (sampling.compute_logprobs(PROMPT, last).result() for last in (None, 2))
    assert end[:-2] == [None] * (len(whole) - 2)
    np.testing.assert_allclose(end[-2:], whole[-2:], atol=1e-5)


def test_a_k_beyond_the_vocabulary_is_refused_by_name(sampling: tinker.SamplingClient):
    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs 100000"):
        sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), topk_sample_logprobs=100_000).result()


def test_a_sample_that_is_given_up_stops_in_the_engine_and_the_next_one_runs(
    stack: Stack, service: tinker.ServiceClient
):
    base = service.create_sampling_client(base_model=BASE).result()
    endless = types.SamplingParams(max_tokens=400, temperature=1.0, stop=[])
    given_up = base.sample(PROMPT, num_samples=512, sampling_params=endless).future()
    with stack.redis() as client:
        running = keys.lease(f"{base._sampling_session_id}:0")
        await_true(lambda: client.exists(running) and awaited(stack.url, base), "it never ran")
    assert given_up.cancel()
    await_true(lambda: stopped(stack, f"{base._sampling_session_id}:0"), "it was not stopped")
    (sequence,) = base.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result().sequences
    assert len(sequence.tokens) == GREEDY.max_tokens


def stopped(stack: Stack, request_id: str) -> bool:
    """Tells if its sampler reports that."""
    lines = (line for log in (stack.data_dir / "logs").glob("sampler*") for line in log.read_text().splitlines())
    return any("sample stopped" in line and request_id in line for line in lines)

"""Promises of every SamplerBackend, tested on both backends against plain transformers and PEFT."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from app.errors import OpError, UserOpError
from tests.conformance.samplers import ADAPTERS, CONTEXT, PROMPTS, ask, one, tokens_of
from tests.models import VOCAB_SIZE
from workers.backends.sampling.base import SamplerBackend


@pytest.mark.parametrize("adapter", [None, "one"])
def test_greedy_tokens_are_those_of_plain_generate(sampler, reference, adapter):
    for prompt in PROMPTS:
        reference.assert_greedy(adapter, prompt, one(sampler, adapter, prompt, temperature=0.0).tokens)


@pytest.mark.parametrize("adapter", [None, "one"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.3}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.0}])
def test_sampled_logprobs_are_the_models_own_whatever_shapes_the_draw(sampler, reference, adapter, fields):
    sequence = one(sampler, adapter, PROMPTS[1], **fields)
    assert (sequence.tokens.dtype, sequence.logprobs.dtype) == (np.int32, np.float32)
    whole = np.concatenate([PROMPTS[1], sequence.tokens])
    np.testing.assert_allclose(sequence.logprobs, reference.logprobs(adapter, whole)[-12:], atol=reference.atol)


@pytest.mark.parametrize("adapter", [None, "two"])
def test_prompt_logprobs_are_the_models_with_nan_first(sampler, reference, adapter):
    for prompt in PROMPTS:
        scores = sampler.sample(adapter, ask(prompt, prompt_logprobs=True, max_tokens=1, num_samples=2)).prompt_logprobs
        assert scores.dtype == np.float32
        assert scores.shape == prompt.shape
        assert np.isnan(scores[0])
        np.testing.assert_allclose(scores[1:], reference.logprobs(adapter, prompt), atol=reference.atol)


def test_prompt_logprobs_are_there_only_when_asked_for(sampler):
    assert sampler.sample(None, ask(PROMPTS[0])).prompt_logprobs is None


def test_adapters_and_the_base_in_one_batch_do_not_mix(sampler, reference):
    calls = [(adapter, prompt) for prompt in PROMPTS for adapter in (None, *ADAPTERS)]
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(one, sampler, adapter, prompt, temperature=0.0) for adapter, prompt in calls]
        found = [future.result() for future in running]
    for (adapter, prompt), sequence in zip(calls, found, strict=True):
        reference.assert_greedy(adapter, prompt, sequence.tokens)
        whole = np.concatenate([prompt, sequence.tokens])
        np.testing.assert_allclose(sequence.logprobs, reference.logprobs(adapter, whole)[-12:], atol=reference.atol)
    assert len({tuple(s.tokens) for (_, p), s in zip(calls, found, strict=True) if p is PROMPTS[1]}) == 4


def test_the_samples_of_one_call_differ_and_a_repeat_is_equal_beside_other_requests(sampler, reference):
    request = ask(PROMPTS[1], num_samples=4, seed=7)
    alone = tokens_of(sampler.sample("one", request))
    assert len({tuple(tokens) for tokens in alone}) == 4
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(sampler.sample, "two", ask(PROMPTS[3], seed=i, max_tokens=5 + i)) for i in range(15)]
        again = tokens_of(sampler.sample("one", request))
        assert [len(future.result().sequences[0].tokens) for future in others] == list(range(5, 20))
    reference.assert_repeated(again, alone)


def test_another_seed_gives_other_samples(sampler):
    assert tokens_of(sampler.sample(None, ask(PROMPTS[1], seed=1))) != tokens_of(
        sampler.sample(None, ask(PROMPTS[1], seed=2))
    )


def test_more_samples_do_not_change_the_first_ones(sampler, reference):
    many = tokens_of(sampler.sample(None, ask(PROMPTS[1], num_samples=40)))  # more than max_batch rows
    assert len({tuple(tokens) for tokens in many}) == 40
    reference.assert_repeated(many[:3], tokens_of(sampler.sample(None, ask(PROMPTS[1], num_samples=3))))


def test_draws_follow_the_distribution_cut_by_top_k(sampler, reference):
    samples = tokens_of(sampler.sample(None, ask(PROMPTS[1], num_samples=400, max_tokens=1, top_k=2)))
    logprobs, best = reference.table(None, PROMPTS[1])[-1].topk(2)
    assert {token for (token,) in samples} == set(best.tolist())
    share = np.mean([token == best[0].item() for (token,) in samples])
    assert abs(share - logprobs.softmax(-1)[0].item()) < 0.1  # 4 standard deviations


def test_a_tiny_top_p_leaves_the_likeliest_token(sampler, reference):
    reference.assert_greedy("one", PROMPTS[1], one(sampler, "one", PROMPTS[1], top_p=1e-6).tokens)


def test_a_stop_token_ends_the_sequence_and_is_part_of_it(sampler):
    expected = one(sampler, None, PROMPTS[1], temperature=0.0).tokens.tolist()
    stop = expected[5]
    sequence = one(sampler, None, PROMPTS[1], temperature=0.0, stop_tokens=(stop,))
    assert sequence.stopped
    assert sequence.tokens.tolist() == expected[: expected.index(stop) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_a_stop_string_over_several_tokens_ends_the_sequence_with_the_token_that_completes_it(sampler, reference):
    tokenizer = Tokenizer.from_file(str(reference.folder / "tokenizer.json"))
    seed, tokens = _ascii_output(sampler, tokenizer)
    text = tokenizer.decode(tokens)
    stop = text[1:3]
    sequence = one(sampler, None, PROMPTS[1], seed=seed, stop_strings=("never said", stop))
    assert sequence.stopped
    assert sequence.tokens.tolist() == tokens[: text.index(stop) + 2]


def _ascii_output(sampler: SamplerBackend, tokenizer: Tokenizer) -> tuple[int, list[int]]:
    """Returns a seed, and its four tokens of one ASCII character each, so that text and tokens line up."""
    for seed in range(500):
        tokens = one(sampler, None, PROMPTS[1], seed=seed, max_tokens=4).tokens.tolist()
        if len(tokenizer.decode(tokens)) == 4 and tokenizer.decode(tokens).isascii():
            return seed, tokens
    raise AssertionError("no seed gave ASCII output")


def test_text_of_the_prompt_completes_no_stop_string(sampler, reference):
    tokenizer = Tokenizer.from_file(str(reference.folder / "tokenizer.json"))
    prompt = np.array(tokenizer.encode("stop").ids, np.int32)
    assert not one(sampler, None, prompt, stop_strings=("stop", "top"), max_tokens=3).stopped


def test_text_of_a_prompt_that_ends_in_half_a_character_completes_none_either(sampler, reference):
    tokenizer = Tokenizer.from_file(str(reference.folder / "tokenizer.json"))
    prompt = np.array(tokenizer.encode("stop é").ids[:-1], np.int32)
    free = one(sampler, None, prompt, max_tokens=12)
    stopping = one(sampler, None, prompt, max_tokens=12, stop_strings=("stop",))
    assert (stopping.tokens.tolist(), stopping.stopped) == (free.tokens.tolist(), False)


def test_the_end_token_ends_a_sequence_unless_ignored(sampler, reference):
    end = int(AutoModelForCausalLM.from_pretrained(reference.folder).generation_config.eos_token_id)
    free = tokens_of(sampler.sample(None, ask(PROMPTS[1], num_samples=60, max_tokens=60, temperature=2.0)))
    assert any(end in tokens for tokens in free)
    assert {len(tokens) for tokens in free} == {60}
    ended = sampler.sample(None, ask(PROMPTS[1], num_samples=60, max_tokens=60, temperature=2.0, ignore_eos=False))
    reference.assert_repeated(tokens_of(ended), [_until(end, whole) for whole in free])
    for sequence in ended.sequences:
        assert sequence.tokens.tolist() == _until(end, sequence.tokens.tolist())
        assert sequence.stopped == (end in sequence.tokens)
        assert sequence.stopped or len(sequence.tokens) == 60


def _until(end: int, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def test_max_tokens_and_the_context_bound_a_sequence(sampler):
    short = one(sampler, None, PROMPTS[0], max_tokens=3)
    assert (len(short.tokens), short.stopped) == (3, False)
    long = one(sampler, None, PROMPTS[3], max_tokens=10_000)
    assert (len(long.tokens), long.stopped) == (CONTEXT - len(PROMPTS[3]), False)


@pytest.mark.parametrize("length", [0, CONTEXT])
def test_a_prompt_without_room_for_a_token_is_the_users_error(sampler, length):
    with pytest.raises(UserOpError, match=f"{length} tokens.*1 to {CONTEXT - 1}"):
        sampler.sample(None, ask(np.ones(length, np.int32)))


def test_a_token_outside_the_vocabulary_is_the_users_error(sampler):
    with pytest.raises(UserOpError, match=f"{VOCAB_SIZE} is outside the vocabulary"):
        sampler.sample(None, ask(np.array([1, VOCAB_SIZE], np.int32)))


def test_sixteen_threads_get_each_their_own_answer(sampler, reference):
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda i: one(sampler, "two", PROMPTS[i % 4], temperature=0.0).tokens, range(48))
    for i, tokens in enumerate(found):
        reference.assert_greedy("two", PROMPTS[i % 4], tokens)


def test_an_evicted_adapter_is_gone_until_it_is_loaded_again(sampler, reference):
    sampler.evict("one")
    sampler.evict("one")
    with pytest.raises(OpError, match="'one' is not loaded"):
        one(sampler, "one", PROMPTS[1])
    sampler.load("one", reference.adapters["one"])
    sampler.load("one", reference.adapters["one"])
    reference.assert_greedy("one", PROMPTS[1], one(sampler, "one", PROMPTS[1], temperature=0.0).tokens)


def test_an_id_loaded_again_from_another_folder_has_the_new_weights(sampler, reference):
    sampler.load("passing", reference.adapters["one"])
    sampler.evict("passing")
    sampler.load("passing", reference.adapters["two"])
    reference.assert_greedy("two", PROMPTS[1], one(sampler, "passing", PROMPTS[1], temperature=0.0).tokens)
    sampler.evict("passing")


def test_a_folder_without_an_adapter_is_refused_and_serving_goes_on(sampler, tmp_path):
    with pytest.raises(OpError):
        sampler.load("nothing", tmp_path)
    assert len(one(sampler, None, PROMPTS[0]).tokens) == 12
    assert sampler.healthy()


def test_an_adapter_with_nan_weights_fails_its_own_requests_alone(sampler, reference, tmp_path):
    folder = reference.adapters["one"]
    tensors = {
        name: tensor.fill_(torch.nan) for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    sampler.load("broken", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        broken = pool.submit(one, sampler, "broken", PROMPTS[1])
        sound = pool.submit(one, sampler, "two", PROMPTS[1], temperature=0.0)
        reference.assert_greedy("two", PROMPTS[1], sound.result().tokens)
        with pytest.raises(UserOpError, match="not finite"):
            broken.result()
    # It also leaves nothing behind in the cache, whose memory these requests get.
    for prompt in PROMPTS:
        reference.assert_greedy(None, prompt, one(sampler, None, prompt, temperature=0.0).tokens)
    sampler.evict("broken")


def test_describe_says_what_runs(sampler, reference):
    described = sampler.describe()
    assert described["sampler"] in ("TransformersSampler", "VllmSampler")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    device = f"cuda:{first or 0}" if torch.cuda.is_available() else "cpu"
    assert (described["dtype"], described["devices"]) == (reference.dtype, [device])
    assert described["adapters"] == sorted(ADAPTERS)

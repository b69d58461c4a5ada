"""OpenAI's completions, without streaming."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from app.domain.results import Result
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest, TokenLogprobs
from tests.unit.app.api.chat.openai.caller import OpenAi
from tests.unit.app.api.chat.standin import CONTEXT
from tests.unit.app.conftest import BASE


def test_a_completion_is_a_sampling_request_of_its_own(openai: OpenAi):
    openai.standin.says("cd")
    answer = openai.completion(temperature=0.5, top_p=0.9, seed=7, stop=["x", "y"], n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["cd", "cd"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert (answer["object"], answer["model"]) == ("text_completion", BASE)
    (request,) = openai.standin.seen
    assert request.prompt.tolist() == openai.standin.tokenizer.encode("ab").tolist()
    expected = (2, 20, 7, 0.5, 0.9, ("x", "y"), False)
    found = (request.num_samples, request.max_tokens, request.seed, request.temperature, request.top_p)
    assert (*found, request.stop_strings, request.stream) == expected


@pytest.mark.parametrize(("given", "sampled"), [(7, 7), (-1, -1), (0, -1), (None, -1)])
def test_top_k_is_off_with_0_and_minus_1(openai: OpenAi, given: int | None, sampled: int):
    openai.standin.says("cd")
    openai.completion(top_k=given)
    openai.chat(top_k=given)
    assert [request.top_k for request in openai.standin.seen] == [sampled] * 2


def test_a_seed_of_0_is_a_seed_and_no_seed_is_another_one_each_time(openai: OpenAi):
    openai.standin.says("cd")
    for seed in (0, None):
        openai.completion(seed=seed)
        openai.chat(seed=seed)
    given, chosen = openai.standin.seen[:2], openai.standin.seen[2:]
    assert [request.seed for request in given] == [0, 0]
    assert len({request.seed for request in chosen}) == 2


def test_values_that_change_nothing_are_accepted(openai: OpenAi):
    """Programs for vLLM's server send all of them."""
    openai.standin.says("cd")
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": [], "presence_penalty": 0.0}
    openai.completion(**neutral)
    openai.chat(**neutral)
    assert [request.stop_strings for request in openai.standin.seen] == [(), ()]


def test_a_stop_string_is_no_part_of_the_text(openai: OpenAi):
    openai.standin.answer = lambda *_: SampleOutput((openai.standin.sequence("one\ntwo", stopped=True),))
    choice = openai.completion(stop="\n", logprobs=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
    assert choice["logprobs"]["tokens"] == ["o", "n", "e"]


def test_what_ends_at_its_limit_says_so(openai: OpenAi):
    openai.standin.says("cd", stopped=False)
    assert openai.completion()["choices"][0]["finish_reason"] == "length"


PROMPTS = {
    "a text": ("ab", ["ab"]),
    "texts": (["ab", "c"], ["ab", "c"]),
    "tokens": ([97, 98], ["tokens"]),
    "lists of tokens": ([[97], [98]], ["tokens", "tokens"]),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_every_form_of_prompt_is_answered_in_order(openai: OpenAi, case: str):
    prompt, wanted = PROMPTS[case]
    openai.standin.answer = lambda _, request: SampleOutput(
        tuple(openai.standin.sequence(f"{request.prompt.tolist()}") for _ in range(request.num_samples))
    )
    answer = openai.completion(prompt=prompt, n=2)
    lists = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    tokens = [openai.standin.tokenizer.encode(p).tolist() if isinstance(p, str) else p for p in lists]
    assert len(tokens) == len(wanted)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    assert texts == [str(entry) for entry in tokens for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_the_prompt_is_echoed_with_its_logprobs(openai: OpenAi):
    def answer(_: str, request: SampleRequest) -> SampleOutput:
        scores = np.array([np.nan, -3.0], np.float32)
        top = TokenLogprobs(np.array([[0], [10]], np.int32), np.array([[-99999.0], [-0.5]], np.float32))
        sampled = replace(openai.standin.sequence("c", stopped=False), top=None)
        sampled = replace(sampled, top=TokenLogprobs(np.array([[11]], np.int32), np.array([[-0.25]], np.float32)))
        return SampleOutput((sampled,), scores, prompt_top=top)

    openai.standin.answer = answer
    choice = openai.completion(echo=True, logprobs=1)["choices"][0]
    token = openai.standin.tokenizer.token
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -3.0, -1.0],
        "top_logprobs": [None, {token(10): -0.5, "b": -3.0}, {token(11): -0.25, "c": -1.0}],
        "text_offset": [0, 1, 2],
    }
    (request,) = openai.standin.seen
    assert (request.prompt_logprobs, request.sample_top, request.prompt_top) == (True, 1, 1)


def test_a_prompt_can_be_scored_without_a_completion(openai: OpenAi):
    openai.standin.answer = lambda *_: SampleOutput(
        (openai.standin.sequence("c", stopped=False),), np.array([np.nan, -3.0], np.float32)
    )
    answer = openai.completion(echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("ab", [None, -3.0])
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)


def test_a_prompt_that_fills_the_context_can_be_scored(openai: OpenAi):
    empty = SampledSequence(np.empty(0, np.int32), np.empty(0, np.float32), stopped=False)
    scores = np.full(CONTEXT, -3.0, np.float32)
    openai.standin.answer = lambda *_: SampleOutput((empty,), scores)
    answer = openai.completion(prompt="a" * CONTEXT, echo=True, logprobs=0, max_tokens=1)
    choice = answer["choices"][0]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("a" * CONTEXT, scores.tolist())
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)


@pytest.mark.parametrize(("category", "status"), [("user", 400), ("server", 500)])
def test_a_failed_request_is_an_error_of_whoever_is_at_fault(openai: OpenAi, category: str, status: int):
    openai.standin.answer = lambda *_: Result(json.dumps({"error": "so", "category": category}).encode(), failed=True)
    answer = openai.post("completions", prompt="ab")
    assert (answer.status_code, answer.json["error"]["message"]) == (status, "so")


def test_what_changes_nothing_is_taken(openai: OpenAi):
    openai.standin.says("cd")
    neutral = {"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me"}
    assert openai.completion(**neutral, suffix=None, seed=None, logprobs=None)["choices"][0]["text"] == "cd"
    assert openai.chat(response_format={"type": "text"}, store=False, metadata={})["choices"]

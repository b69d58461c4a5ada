"""Token ids in OpenAI's answers, as vLLM's server gives them."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.sampling import SampleOutput, SampleRequest
from tests.unit.app.api.chat.openai.caller import OpenAi, events

END = 257


def tokens(openai: OpenAi, text: str) -> list[int]:
    return openai.standin.tokenizer.encode(text).tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_every_token_of_its_prompt_and_of_each_choice(openai: OpenAi, stream: bool):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        openai.standin.draw(request_id, "é")
        return SampleOutput((openai.standin.sequence("é!"), openai.standin.sequence("ab", stopped=False)))

    openai.standin.answer = answer
    asked = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True, "return_token_ids": True}
    answered = openai.post("chat/completions", stream=stream, **asked)
    chunks = events(answered) if stream else [answered.json]
    (request,) = openai.standin.seen
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [request.prompt.tolist()]
    assert "prompt_token_ids" in chunks[0]
    for index, expected in enumerate(([*tokens(openai, "é!"), END], tokens(openai, "ab"))):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for part in parts for token in part["token_ids"]] == expected
        scores = [entry["logprob"] for part in parts for entry in part["logprobs"]["content"]]
        assert len(scores) == len(expected), "one for each token, that of the end too"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_them_in_each_choice(openai: OpenAi, stream: bool):
    openai.standin.says("stop it")
    asked: dict[str, Any] = {"prompt": ["ab", "c"], "stop": "p i", "return_token_ids": True, "max_tokens": 20}
    answered = openai.post("completions", stream=stream, **asked)
    choices = [choice for chunk in (events(answered) if stream else [answered.json]) for choice in chunk["choices"]]
    for index, prompt in enumerate(asked["prompt"]):
        parts = [choice for choice in choices if choice["index"] == index]
        assert "".join(part["text"] for part in parts) == "sto"
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [tokens(openai, prompt)]
        ids = [token for part in parts for token in part["token_ids"]]
        assert ids == [*tokens(openai, "stop it"), END], "those of the stop too"
        assert all(part["logprobs"] is None for part in parts)


def test_without_the_question_there_are_none(openai: OpenAi):
    openai.standin.says("a")
    chat, completion = openai.chat(), openai.completion()
    assert "prompt_token_ids" not in chat
    assert all("token_ids" not in answer["choices"][0] for answer in (chat, completion))


def test_an_echo_has_its_prompt_in_the_text_alone(openai: OpenAi):
    answer = openai.post("completions", prompt="ab", echo=True, return_token_ids=True)
    assert (answer.status_code, "prompt_token_ids" in answer.json["error"]["message"]) == (400, True)

"""Anthropic's own client against a running stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.contract.data import datum, train
from tests.contract.stack import API_KEY, BASE, Stack

pytestmark = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)

SYSTEM = "Be short."
ASK: list[Any] = [{"role": "user", "content": "Grüße & <b>?"}]
TOOL: Any = {"name": "weather", "description": "of a town", "input_schema": {"type": "object"}}
CALL = 'Yes.<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'
# The newest clients have no arguments for the parameters of sampling.
GREEDY: dict[str, Any] = {"model": BASE, "messages": ASK, "max_tokens": 24, "extra_body": {"temperature": 0.0}}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{stack.url}/anthropic/api", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(stack: Stack) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(stack.base_path)


@pytest.fixture(scope="module")
def caller_of_tools(stack: Stack, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A request to a model that was taught to answer it with CALL."""
    prompt = templated(tokenizer, [{"role": "system", "content": SYSTEM}, *ASK], with_tool=True)
    tokens = [*prompt, *tokenizer.encode(CALL), tokenizer.eos_token_id]
    weights = [float(len(prompt) <= place + 1 < len(tokens)) for place in range(len(tokens))]
    with stack.client() as service:
        training = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        train(training, 60, [datum(tokens, weights=weights)])
        path = training.save_weights_for_sampler("anthropic").result().path
    return {**GREEDY, "model": path, "max_tokens": 100, "system": SYSTEM, "tools": [TOOL]}


def templated(tokenizer: PreTrainedTokenizerFast, messages: list[Any], *, with_tool: bool = False) -> list[int]:
    described = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    tools = [{"type": "function", "function": described}] if with_tool else None
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def content(message: anthropic.types.Message) -> list[Any]:
    """The blocks of a message without their ids."""
    return [block.text if block.type == "text" else (block.name, block.input) for block in message.content]


def test_a_message_has_the_text_that_openais_client_gets(
    client: anthropic.Anthropic, tokenizer: PreTrainedTokenizerFast, stack: Stack
):
    answer = client.messages.create(system=[{"type": "text", "text": SYSTEM}], **GREEDY)
    messages = [{"role": "system", "content": SYSTEM}, *ASK]
    with openai.OpenAI(base_url=f"{stack.url}/oai/api/v1", api_key=API_KEY) as other:
        expected = other.chat.completions.create(model=BASE, messages=messages, max_tokens=24, temperature=0.0)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", expected.choices[0].message.content)
    reason = {"length": "max_tokens", "stop": "end_turn"}[expected.choices[0].finish_reason]
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", BASE, reason)
    assert answer.usage.input_tokens == len(templated(tokenizer, messages))
    assert answer.usage.output_tokens == expected.usage.completion_tokens


def test_a_stream_has_the_message_that_is_sent_at_once(client: anthropic.Anthropic):
    asked = {**GREEDY, "max_tokens": 200, "extra_body": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text
    assert (content(streamed), streamed.stop_reason) == (content(whole), whole.stop_reason)
    assert streamed.usage == whole.usage
    kinds = [event.type for event in client.messages.create(stream=True, **asked)]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]


def test_a_stop_sequence_ends_a_message_and_is_named(client: anthropic.Anthropic):
    free = client.messages.create(**GREEDY).content[0].text
    stop = next(letter for letter in free[3:] if letter != "\ufffd" and not letter.isspace())
    answer = client.messages.create(stop_sequences=["never", stop], **GREEDY)
    assert answer.content[0].text == free[: free.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_a_tuned_model_calls_a_tool_and_gets_its_result(
    client: anthropic.Anthropic, tokenizer: PreTrainedTokenizerFast, caller_of_tools: dict[str, Any]
):
    answer = client.messages.create(**caller_of_tools)
    assert content(answer) == ["Yes.", ("weather", {"town": "Ulm"})]
    assert answer.stop_reason == "tool_use"
    with client.messages.stream(**caller_of_tools) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert "".join(parts) == '{"town": "Ulm"}'
    assert content(streamed) == content(answer)
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "sun"}
    talk = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**caller_of_tools, "messages": talk, "max_tokens": 1})
    called = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    expected = templated(
        tokenizer,
        [
            {"role": "system", "content": SYSTEM},
            *ASK,
            {"role": "assistant", "content": "Yes.", "tool_calls": [called]},
            {"role": "tool", "content": "sun"},
        ],
        with_tool=True,
    )
    assert after.usage.input_tokens == len(expected)


def test_tokens_are_counted_before_a_message_as_after_it(client: anthropic.Anthropic, caller_of_tools: dict[str, Any]):
    asked = {key: value for key, value in caller_of_tools.items() if key not in ("max_tokens", "extra_body")}
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == client.messages.create(**caller_of_tools).usage.input_tokens


def test_models_are_listed_and_found(client: anthropic.Anthropic, caller_of_tools: dict[str, Any]):
    listed = list(client.models.list(limit=1000))
    assert listed[0].id == BASE
    assert client.models.retrieve(caller_of_tools["model"]) in listed


def test_errors_are_those_of_anthropics_client(client: anthropic.Anthropic):
    for model in ("claude-opus-4-5", f"tinker://{'0' * 36}:train:0/sampler_weights/x"):
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(**{**GREEDY, "model": model})
        assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="container") as refused:
        client.messages.create(container="a container", **GREEDY)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id == refused.value.body["request_id"]
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        client.with_options(api_key="tml-wrong").messages.create(**GREEDY)
    assert unknown.value.type == "authentication_error"
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as not_served:
        client.with_options(max_retries=2).messages.batches.list()
    assert not_served.value.request.headers["x-stainless-retry-count"] == "0"

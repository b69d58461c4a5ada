"""OpenAI's calls through the API, with a thread that answers as a sampler would."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app import create_app, ids
from app.domain import codec, records
from app.domain.records import Sampler, Session
from app.domain.results import PROTOBUF, Result
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest, TokenLogprobs
from app.errors import Fenced
from app.routes.context import EXTENSION
from app.services.openai.tokenizer import BaseTokenizer, read
from app.settings import ApiSettings, Settings
from app.stores.interfaces import OpLog
from app.stores.redis import keys
from app.stores.redis.client import connect
from app.stores.redis.token_streams import Drawn, TokenStreams
from app.wire.results import encode_sample
from tests.tokenizers import byte_tokenizer
from tests.unit.app.conftest import BASE, KEY, OTHER_KEY, Api, add_worker
from tests.unit.app.routes.test_models import save_checkpoint

OAI = "/oai/api/v1"
CAPACITY = 3
CONTEXT = 512
Answer = Callable[[str, SampleRequest], SampleOutput | Result | None]


@dataclass
class Standin:
    """Answers what is admitted with `answer` (None: not yet), one request after another, and keeps what it saw."""

    oplog: OpLog
    streams: TokenStreams
    tokenizer: BaseTokenizer
    answer: Answer | None = None
    seen: list[SampleRequest] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def says(self, *texts: str, stopped: bool = True) -> None:
        """Every sample i of a request is texts[i], and if `stopped` an end token."""
        self.answer = lambda _, request: SampleOutput(
            tuple(self.sequence(texts[i % len(texts)], stopped) for i in range(request.num_samples))
        )

    def sequence(self, text: str, stopped: bool = True) -> SampledSequence:
        tokens = np.array([*self.tokenizer.encode(text), *([257] if stopped else [])], np.int32)
        return SampledSequence(tokens, np.linspace(-1, -2, len(tokens), dtype=np.float32), stopped)

    def draw(self, request_id: str, text: str, place: int = 0, index: int = 0) -> None:
        tokens = self.tokenizer.encode(text)
        self.streams.add([Drawn(request_id, index, place, tokens, np.zeros(len(tokens), np.float32))])

    def run(self) -> None:
        while not self.over.wait(0.005):
            for waiting in self.oplog.pending() if self.answer else []:
                self._finish(waiting.id)

    def _finish(self, request_id: str) -> None:
        try:
            entry = self.oplog.claim_sample(request_id, "node/test")
        except Fenced:
            return
        if entry is not None:
            self.seen.append(codec.decode(entry.payload))
            result = self.answer(request_id, self.seen[-1])
            if isinstance(result, SampleOutput):
                result = Result(encode_sample(result), PROTOBUF)
            if result is not None:
                self.oplog.finish_sample(request_id, result)


@dataclass
class OpenAi:
    """One caller of OpenAI's paths."""

    api: Api
    standin: Standin
    key: str = KEY

    def post(self, path: str, **body: Any) -> TestResponse:
        headers = {"Authorization": f"Bearer {self.key}"}
        return self.api.client.post(f"{OAI}/{path}", json={"model": BASE, **body}, headers=headers)

    def completion(self, **body: Any) -> dict[str, Any]:
        answer = self.post("completions", **{"prompt": "ab", "max_tokens": 20, **body})
        assert answer.status_code == 200, answer.text
        return answer.json

    def chat(self, **body: Any) -> dict[str, Any]:
        answer = self.post("chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})
        assert answer.status_code == 200, answer.text
        return answer.json

    def models(self) -> list[str]:
        answer = self.api.client.get(f"{OAI}/models", headers={"Authorization": f"Bearer {self.key}"})
        return [model["id"] for model in answer.json["data"]]


def text(answer: TestResponse) -> str:
    """All of a stream."""
    with answer:
        return answer.text


def events(answer: TestResponse) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert answer.mimetype == "text/event-stream"
    *lines, last, empty = text(answer).split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@pytest.fixture(scope="module")
def app(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Flask:
    folder = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    base = settings.base_models[0].model_copy(update={"path": str(folder)})
    limits = ApiSettings(poll_hold_s=0.3, poll_capacity=CAPACITY)
    return create_app(settings.model_copy(update={"base_models": (base,), "api": limits}))


@pytest.fixture
def openai(app: Flask, state_url: str) -> Iterator[OpenAi]:
    services = app.extensions[EXTENSION]
    with connect(state_url) as client, connect(services.settings.broker_url) as broker:
        client.flushall()
        add_worker(services, "trainer")
        add_worker(services, "sampler", CONTEXT)
        tokenizer = read(services.settings.base_models[0].path)
        standin = Standin(services.oplog, TokenStreams(broker), tokenizer)
        thread = threading.Thread(target=standin.run, daemon=True)
        thread.start()
        yield OpenAi(Api(app.test_client(), services), standin)
        standin.over.set()
        thread.join(30)


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


def test_tokens_are_streamed_before_the_result_is_there(openai: OpenAi):
    shown = threading.Event()

    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        openai.standin.draw(request_id, "one ")
        assert shown.wait(30), "the first text came only with the result"
        return SampleOutput((openai.standin.sequence("one two"),))

    openai.standin.answer = answer
    response = openai.post("completions", prompt="ab", stream=True, max_tokens=20)
    parts = iter(response.response)
    first = json.loads(next(parts).decode().removeprefix("data: "))
    assert "one ".startswith(first["choices"][0]["text"]) and first["choices"][0]["text"]
    shown.set()
    rest = [json.loads(part.decode().removeprefix("data: ")) for part in parts if b"[DONE]" not in part]
    assert streamed([first, *rest]) == "one two"
    assert [chunk["choices"][0]["finish_reason"] for chunk in [first, *rest]][-1] == "stop"
    response.close()


LOST = {
    "nothing came": [],
    "the middle is missing": [("on", 0), ("two", 4)],
    "another sampler began anew": [("one t", 0), ("on", 0), ("one two th", 0)],
    "the end came twice": [("one ", 0), ("two three", 4), ("two three", 4)],
}


@pytest.mark.parametrize("case", LOST)
def test_what_a_stream_lost_or_told_twice_is_made_good_from_the_result(openai: OpenAi, case: str):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        for text, place in LOST[case]:
            openai.standin.draw(request_id, text, place)
        return SampleOutput((openai.standin.sequence("one two three"),))

    openai.standin.answer = answer
    chunks = events(openai.post("completions", prompt="ab", stream=True, max_tokens=20, logprobs=0))
    assert streamed(chunks) == "one two three"
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert tokens == list("one two three")


def test_samples_of_one_stream_keep_apart(openai: OpenAi):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        for place, (one, two) in enumerate(zip("one", "two", strict=True)):
            openai.standin.draw(request_id, two, place, index=1)
            openai.standin.draw(request_id, one, place, index=0)
        return SampleOutput((openai.standin.sequence("one"), openai.standin.sequence("two")))

    openai.standin.answer = answer
    chunks = [chunk["choices"][0] for chunk in events(openai.post("completions", prompt="ab", stream=True, n=2))]
    for index, text in enumerate(("one", "two")):
        assert "".join(choice["text"] for choice in chunks if choice["index"] == index) == text
    assert sum(choice["finish_reason"] == "stop" for choice in chunks) == 2


def test_a_stream_ends_with_its_usage_if_it_is_asked_for(openai: OpenAi):
    openai.standin.says("cd")
    options = {"include_usage": True}
    *chunks, last = events(openai.post("completions", prompt="ab", stream=True, stream_options=options))
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_a_streams_failure_is_its_last_event(openai: OpenAi):
    failure = json.dumps({"error": "the adapter holds NaN", "category": "user"}).encode()
    openai.standin.answer = lambda *_: Result(failure, failed=True)
    answer = openai.post("completions", prompt="ab", stream=True)
    (event, empty) = text(answer).split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["message"], error["type"], empty) == ("the adapter holds NaN", "invalid_request_error", "")


@pytest.mark.parametrize(("category", "status"), [("user", 400), ("server", 500)])
def test_a_failed_request_is_an_error_of_whoever_is_at_fault(openai: OpenAi, category: str, status: int):
    openai.standin.answer = lambda *_: Result(json.dumps({"error": "so", "category": category}).encode(), failed=True)
    answer = openai.post("completions", prompt="ab")
    assert (answer.status_code, answer.json["error"]["message"]) == (status, "so")


def test_a_chat_goes_through_the_models_template(openai: OpenAi):
    openai.standin.says("hello")
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    answer = openai.chat(messages=messages)
    text = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    (request,) = openai.standin.seen
    assert openai.standin.tokenizer.core.decode(request.prompt.tolist(), skip_special_tokens=False) == text
    assert request.max_tokens == CONTEXT - len(request.prompt)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], answer["object"]) == ("stop", "chat.completion")


def test_a_chats_tokens_are_scored_with_their_bytes(openai: OpenAi):
    def answer(_: str, request: SampleRequest) -> SampleOutput:
        top = TokenLogprobs(np.array([[64, 65], [66, 67]], np.int32), np.full((2, 2), -0.5, np.float32))
        return SampleOutput((replace(openai.standin.sequence("é", stopped=False), top=top),))

    openai.standin.answer = answer
    content = openai.chat(logprobs=True, top_logprobs=2, max_tokens=5)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-1.0, -2.0]
    assert [entry["bytes"] for entry in content] == [None, None], "each is half a character"
    assert [top["bytes"] for top in content[0]["top_logprobs"]] == [
        list(openai.standin.tokenizer.token(token).encode()) for token in (64, 65)
    ]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'


def test_a_tool_is_offered_and_its_call_is_read(openai: OpenAi):
    openai.standin.says(CALL)
    (choice,) = openai.chat(tools=TOOLS)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"town": "Ulm"}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_streamed_call_is_no_text(openai: OpenAi):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        openai.standin.draw(request_id, CALL[:20])
        return SampleOutput((openai.standin.sequence(CALL),))

    openai.standin.answer = answer
    messages = [{"role": "user", "content": "?"}]
    chunks = events(openai.post("chat/completions", messages=messages, tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == [0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(openai: OpenAi):
    openai.standin.says(CALL)
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = openai.chat(**more)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "best_of": ("completions", {"best_of": 5}, "best_of"),
    "suffix": ("completions", {"suffix": "x"}, "suffix"),
    "bias": ("completions", {"logit_bias": {"1": 5}}, "logit_bias"),
    "penalty": ("completions", {"presence_penalty": 0.5}, "presence_penalty"),
    "unknown": ("completions", {"top_kk": 5}, "top_kk"),
    "hot": ("completions", {"temperature": 2.5}, "temperature"),
    "no tokens": ("completions", {"max_tokens": 0}, "max_tokens"),
    "too many logprobs": ("completions", {"logprobs": 21}, "logprobs"),
    "a bad prompt": ("completions", {"prompt": {"a": 1}}, "prompt"),
    "mixed prompts": ("completions", {"prompt": ["a", 1]}, "prompt"),
    "many prompts": ("completions", {"prompt": ["a"] * 257}, "257"),
    "no prompt": ("completions", {"prompt": []}, "prompt"),
    "a token beyond": ("completions", {"prompt": [4000]}, "4000"),
    "a huge token": ("completions", {"prompt": [2**40]}, "32-bit"),
    "a long prompt": ("completions", {"prompt": "a" * CONTEXT}, str(CONTEXT)),
    "a text for ever": ("completions", {"prompt": ["a", "a" * (16 * CONTEXT + 1)]}, "characters"),
    "a chat for ever": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a" * (16 * CONTEXT)}]},
        "characters",
    ),
    "much to repeat": (
        "completions",
        {"prompt": ["a" * 400] * 10, "n": 128, "echo": True, "logprobs": 20},
        "echo with logprobs: 2688 at each of 4000 positions",
    ),
    "bad stop": ("completions", {"stop": [1]}, "stop"),
    "empty stop": ("completions", {"stop": [""]}, "empty"),
    "json": ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    "required": ("chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    "an image": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    "a role": ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "role"),
    "half a surrogate pair": ("completions", {"prompt": "\ud800"}, "surrogate"),
    "half of one in a chat": ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    "no messages": ("chat/completions", {"messages": []}, "messages"),
    "top without": ("chat/completions", {"top_logprobs": 2}, "logprobs"),
    "bad arguments": (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "arguments",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_a_400_by_name_and_nothing_is_enqueued(openai: OpenAi, case: str):
    path, change, named = BAD[case]
    given = {"prompt": "ab"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = openai.post(path, **{**given, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert named in answer.json["error"]["message"]
    assert openai.api.services.oplog.pending() == []
    assert list(openai.api.services.records.list("samplers")) == []


def test_what_changes_nothing_is_taken(openai: OpenAi):
    openai.standin.says("cd")
    neutral = {"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me"}
    assert openai.completion(**neutral, suffix=None, seed=None, logprobs=None)["choices"][0]["text"] == "cd"
    assert openai.chat(response_format={"type": "text"}, store=False, metadata={})["choices"]


def test_ones_own_checkpoint_is_a_model_and_anothers_looks_missing(openai: OpenAi):
    openai.standin.says("cd")
    path = save_checkpoint(openai.api, openai.api.model(), "sampler_weights", prefix="models/x")
    stranger = replace(openai, key=OTHER_KEY)
    for name in (path, f"{BASE};{path}"):
        assert openai.completion(model=name)["choices"][0]["text"] == "cd"
        foreign = stranger.post("completions", model=name, prompt="ab")
        assert (foreign.status_code, foreign.json["error"]["code"]) == (404, "model_not_found")
    no_path = f"{path}-b"
    missing = openai.post("completions", model=no_path, prompt="ab")
    assert missing.json["error"]["message"].replace(no_path, path) == foreign.json["error"]["message"]
    assert openai.models() == [BASE, path]
    assert stranger.models() == [BASE]
    prefixes = {records.load(Sampler, stored).prefix for _, stored in openai.api.services.records.list("samplers")}
    assert prefixes == {"models/x"}


def test_a_path_saved_anew_is_sampled_as_it_is_now(openai: OpenAi):
    openai.standin.says("cd")
    model = openai.api.model()
    for prefix in ("models/old", "models/new"):
        openai.completion(model=save_checkpoint(openai.api, model, "sampler_weights", prefix=prefix))
    stored = [records.load(Sampler, fields).prefix for _, fields in openai.api.services.records.list("samplers")]
    assert sorted(stored) == ["models/new", "models/old"]


def test_all_calls_of_an_owner_are_in_one_session_that_they_keep_alive(openai: OpenAi):
    openai.standin.says("cd")
    for _ in range(2):
        openai.completion()
    replace(openai, key=OTHER_KEY).completion()
    owners = [records.load(Session, stored).owner for _, stored in openai.api.services.records.list("sessions")]
    assert len(set(owners)) == len(owners) == 2
    with connect(openai.api.services.settings.redis.url) as client:
        for owner in owners:
            assert client.zscore(keys.SESSIONS_HEARD, ids.openai_session_id(owner)) is not None


def test_an_unknown_model_is_named_with_those_there_are(openai: OpenAi):
    answer = openai.post("completions", model="gpt-4o", prompt="ab")
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "model_not_found")
    assert BASE in answer.json["error"]["message"]


def test_a_wrong_key_is_refused_in_openais_words(openai: OpenAi):
    answer = replace(openai, key="tml-wrong").post("completions", prompt="ab")
    assert (answer.status_code, answer.json["error"]["code"]) == (401, "invalid_api_key")


def test_a_model_is_listed_while_its_sampler_lives(openai: OpenAi):
    assert openai.models() == [BASE]
    openai.api.services.records.delete("workers", "sampler-0")
    assert openai.models() == []


def test_other_paths_keep_their_own_form_of_errors(openai: OpenAi):
    assert openai.api.post("asample", {}).json.keys() == {"detail", "error"}


def test_a_request_whose_client_left_is_cancelled(openai: OpenAi):
    openai.standin.answer = lambda request_id, _: openai.standin.draw(request_id, "on its way")
    answer = openai.post("completions", prompt=["ab", "c"], stream=True)
    waiting = [pending.id for pending in openai.api.services.oplog.pending()]
    answer.close()
    assert len(waiting) == 2
    assert openai.api.services.oplog.pending() == []
    for request_id in waiting:
        result = openai.api.services.oplog.outcome(request_id)
        assert result is not None and result.failed


def test_calls_that_wait_are_bounded_and_nothing_is_asked_beyond(openai: OpenAi):
    openai.standin.answer = lambda request_id, _: openai.standin.draw(request_id, "on its way")
    answers = [openai.post("completions", prompt="ab", stream=True) for _ in range(CAPACITY)]
    waiting = {pending.id for pending in openai.api.services.oplog.pending()}
    refused = openai.post("completions", prompt="ab", stream=True)
    assert (refused.status_code, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "Retry-After" in refused.headers
    assert {pending.id for pending in openai.api.services.oplog.pending()} == waiting
    answers[0].close()
    answers[0] = openai.post("completions", prompt="ab", stream=True)
    assert answers[0].status_code == 200, "a client that left made room"
    for answer in answers:
        answer.close()

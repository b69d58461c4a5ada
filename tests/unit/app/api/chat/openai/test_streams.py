"""Streamed answers of OpenAI's calls, and clients that disconnect."""

from __future__ import annotations

import json
import threading

import pytest

from app.domain.results import Result
from app.domain.sampling import SampleOutput, SampleRequest
from tests.unit.app.api.chat.openai.caller import OpenAi, events, streamed, whole
from tests.unit.app.api.chat.standin import CAPACITY


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
def test_what_a_stream_lost_or_sent_twice_is_corrected_from_the_result(openai: OpenAi, case: str):
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
    (event, empty) = whole(answer).split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["message"], error["type"], empty) == ("the adapter holds NaN", "invalid_request_error", "")


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

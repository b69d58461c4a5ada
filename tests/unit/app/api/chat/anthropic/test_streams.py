"""The events of Anthropic's streams."""

from __future__ import annotations

import json
import threading

import pytest

from app.domain.results import Result
from app.domain.sampling import SampleOutput, SampleRequest
from tests.unit.app.api.chat.anthropic.caller import CALL, TOOL, Anthropic, assembled, read_events


@pytest.mark.parametrize(
    "said", ["hello", "", " ", f"Let me see.{CALL}", f"\n {CALL}", f"{CALL}{CALL}", "é <tool_call>?", "\n one END"]
)
@pytest.mark.parametrize("size", [1, 7, 200])
def test_a_streams_events_make_the_message_that_is_sent_at_once(anthropic: Anthropic, said: str, size: int):
    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        for begin in range(0, len(said), size):
            anthropic.standin.draw(request_id, said[begin : begin + size], len(said[:begin].encode()))
        return SampleOutput((anthropic.standin.sequence(said),))

    asked = {"tools": [TOOL], "stop_sequences": ["END"]}
    anthropic.standin.answer = answer
    streamed = assembled(anthropic.events(**asked))
    whole = anthropic.message(**asked)
    for message in (streamed, whole):
        for found in (message, *message["content"]):
            found.pop("id", None)
    assert streamed == whole


def test_text_comes_in_the_pieces_in_which_it_is_sampled(anthropic: Anthropic):
    shown = threading.Event()

    def answer(request_id: str, _: SampleRequest) -> SampleOutput:
        anthropic.standin.draw(request_id, "one ")
        anthropic.standin.draw(request_id, "two ", 4)
        assert shown.wait(30), "the pieces came only with the result"
        return SampleOutput((anthropic.standin.sequence("one two three"),))

    anthropic.standin.answer = answer
    text = ""
    with anthropic.post(stream=True) as response:
        for event in response.response:
            text += event.decode()
            if "two " in text:
                shown.set()
    start, block, *pieces, stop, end, last = read_events(text)
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(anthropic.standin.seen[0].prompt), 0)
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [piece["delta"] for piece in pieces] == [
        {"type": "text_delta", "text": text} for text in ("one ", "two ", "three")
    ]
    assert (stop, last) == ({"type": "content_block_stop", "index": 0}, {"type": "message_stop"})
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == len("one two three") + 1


def test_a_streams_failure_is_its_last_event(anthropic: Anthropic):
    failure = json.dumps({"error": "the adapter holds NaN", "category": "user"}).encode()
    anthropic.standin.answer = lambda *_: Result(failure, failed=True)
    with anthropic.post(stream=True) as answer:
        *_, last = read_events(answer.text)
    assert last["type"] == "error"
    assert last["error"] == {"type": "invalid_request_error", "message": "the adapter holds NaN"}


def test_a_request_whose_client_left_is_cancelled(anthropic: Anthropic):
    anthropic.standin.answer = lambda request_id, _: anthropic.standin.draw(request_id, "on its way")
    answer = anthropic.post(stream=True)
    assert len(anthropic.api.services.oplog.pending()) == 1
    answer.close()
    assert anthropic.api.services.oplog.pending() == []

"""Thoughts, text and tool calls of an answer."""

from __future__ import annotations

import time

import pytest

from app.services.openai.answer_text import AnswerText, ParseOptions, Thoughts, thoughts_of
from app.services.openai.generation import Delta
from app.services.openai.tool_calls import OfferedTools, format_of

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TAGGED = {
    "thoughts and text": ("<think>\nhm\n\nso\n</think>\n\nyes", "hm\n\nso", "yes"),
    "after white space": ("\n <think>hm</think>yes\n", "hm", "yes\n"),
    "none": ("yes <think>no</think>", "", "yes <think>no</think>"),
    "empty ones": ("<think>\n\n</think>\n\nyes", "", "yes"),
    "no end": ("<think>\nhm </thin", "hm </thin", ""),
    "no text": ("<think>hm</think>", "hm", ""),
    "a second tag": ("<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
    "half a tag": ("<thin", "", "<thin"),
    "nothing": ("", "", ""),
}
OPENED = {
    "thoughts and text": ("hm\n</think>\n\nyes", "hm", "yes"),
    "no end": ("hm", "hm", ""),
    "an end at once": ("</think>yes", "", "yes"),
}


def parts(options: ParseOptions, whole: str, size: int) -> tuple[str, str, list[str]]:
    """The parts of an answer that comes in pieces of `size` characters."""
    answer = AnswerText(options)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)] or [""]
    deltas = [Delta(0, piece) for piece in pieces[:-1]] + [Delta(0, pieces[-1], finish="stop")]
    found = [answer.split(delta) for delta in deltas]
    calls = [call.name for part in found for call in part.calls]
    return "".join(part.thoughts for part in found), "".join(part.text for part in found), calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", TAGGED)
def test_thoughts_between_tags_are_no_part_of_the_text(case: str, size: int):
    whole, thoughts, text = TAGGED[case]
    assert parts(ParseOptions(Thoughts.TAGGED), whole, size) == (thoughts, text, [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", OPENED)
def test_thoughts_that_the_prompt_has_opened_need_no_tag(case: str, size: int):
    whole, thoughts, text = OPENED[case]
    assert parts(ParseOptions(Thoughts.OPENED), whole, size) == (thoughts, text, [])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_only_a_thought_is_none(size: int):
    whole = f"<think>{CALL}</think>so:{CALL}"
    form = format_of("<tool_call>")
    assert form is not None
    assert parts(ParseOptions(Thoughts.TAGGED, OfferedTools(form)), whole, size) == (CALL, "so:", ["f"])
    assert parts(ParseOptions(Thoughts.NONE), whole, size) == ("", whole, [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("place", "whole"),
    [
        *((Thoughts.TAGGED, case[0]) for case in TAGGED.values()),
        *((Thoughts.OPENED, case[0]) for case in OPENED.values()),
        (Thoughts.TAGGED, " \n\n<think>\n\n hm\n\n</think>\n\n yes\n"),
    ],
)
def test_thoughts_that_stay_in_the_text_are_as_the_model_wrote_them(place: Thoughts, whole: str, size: int):
    assert parts(ParseOptions(place, separate=False), whole, size) == ("", whole, [])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_within_thoughts_that_stay_in_the_text_is_none(size: int):
    before = f"<think>{CALL}</think>so:"
    form = format_of("<tool_call>")
    assert form is not None
    options = ParseOptions(Thoughts.TAGGED, OfferedTools(form), separate=False)
    assert parts(options, before + CALL, size) == ("", before, ["f"])


def seconds(options: ParseOptions, before: str, piece: str, count: int) -> float:
    """The processor's seconds for `count` deltas, the least of three runs."""
    found = []
    for _ in range(3):
        answer = AnswerText(options)
        answer.split(Delta(0, before))
        began = time.process_time()
        for _ in range(count):
            answer.split(Delta(0, piece))
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize(
    ("before", "piece"), [("<think>a", "\n" * 8), ("<think>", "\n" * 8), ("", " " * 64), ("<think>", "\n<")]
)
@pytest.mark.parametrize("separate", [True, False])
def test_thoughts_of_any_length_are_read_in_linear_time(before: str, piece: str, separate: bool):
    options = ParseOptions(Thoughts.TAGGED, separate=separate)
    few, many = (seconds(options, before, piece, count) for count in (2_000, 16_000))
    assert many < 24 * few, "8 is linear, 64 quadratic"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_line_breaks_within_thoughts_are_kept(size: int):
    breaks = "\n" * 50
    whole = f"<think>{breaks} a{breaks}<b{breaks}</think>{breaks}yes{breaks}"
    assert parts(ParseOptions(Thoughts.TAGGED), whole, size) == (f" a{breaks}<b", f"yes{breaks}", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("whole", [" \n" * 50, " \n" * 50 + "yes", " \n" * 50 + "<thin"])
def test_white_space_before_a_text_without_thoughts_is_kept(whole: str, size: int):
    assert parts(ParseOptions(Thoughts.TAGGED), whole, size) == ("", whole, [])


@pytest.mark.parametrize(
    ("template", "text", "prefill", "place"),
    [
        ("", "<think>\n", "", Thoughts.NONE),
        ("x </think> y", "assistant\n", "", Thoughts.TAGGED),
        ("x </think> y", "user: what is <think>?\nassistant\n", "", Thoughts.TAGGED),
        ("x </think> y", "assistant\n<think>\n", "", Thoughts.OPENED),
        ("x </think> y", "assistant\n<think>\n\n</think>\n\n", "", Thoughts.TAGGED),
        ("x </think> y", "assistant\n<think>\n", "hm", Thoughts.OPENED),
        ("x </think> y", "assistant\n<think>\n", "hm</think>", Thoughts.TAGGED),
        ("x </think> y", "assistant\n", "<think>hm", Thoughts.OPENED),
    ],
)
def test_the_template_and_the_prompt_say_where_thoughts_are(template: str, text: str, prefill: str, place: Thoughts):
    assert thoughts_of(template, text, prefill) is place

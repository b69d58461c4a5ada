"""Answers in harmony, and the messages that templates of gpt-oss take."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from app.services.openai.answer_text import AnswerText, ParseOptions
from app.services.openai.generation import Delta
from app.services.openai.harmony import HarmonyOptions, for_harmony, is_harmony, opened

Parts = tuple[str, str, list[tuple[str, Any]]]

THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
CALLING = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CALL = f'{CALLING}{{"town": "Ulm"}}<|call|>'
CALLED = [("weather", {"town": "Ulm"})]
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>yes<|return|>"
MESSAGES: dict[str, tuple[str, Parts]] = {
    "thoughts and a text": (f"{THOUGHT}{NEXT}{FINAL}", ("hm", "yes", [])),
    "thoughts and a call": (f"{THOUGHT}{NEXT}{CALL}", ("hm", "", CALLED)),
    "a recipient before the channel": (
        f'{THOUGHT}{NEXT} to=functions.weather<|channel|>commentary json<|message|>{{"town": "Ulm"}}<|call|>',
        ("hm", "", CALLED),
    ),
    "a recipient at the beginning": (
        ' to=functions.weather<|channel|>commentary<|constrain|>json<|message|>{"town": "Ulm"}<|call|>',
        ("", "", CALLED),
    ),
    "a call on the channel of thoughts": (
        f"{THOUGHT}{NEXT}{CALL.replace('commentary', 'analysis')}",
        ("hm", "", CALLED),
    ),
    "a tag right behind the recipient": (CALL.replace(" <|constrain|>", "<|constrain|>"), ("", "", CALLED)),
    "thoughts to a recipient": (f"{THOUGHT.replace('analysis', 'analysis to=python')}{NEXT}{FINAL}", ("hm", "yes", [])),
    "a preamble": (f"<|channel|>commentary<|message|>wait<|end|>{NEXT}{CALL}", ("", "wait", CALLED)),
    "two calls": (f"{CALL}{NEXT}{CALL.replace('<|call|>', '<|end|>')}", ("", "", CALLED * 2)),
    "two thoughts and two texts": (
        f"{THOUGHT}{NEXT}{FINAL.replace('<|return|>', '<|end|>')}{NEXT}{THOUGHT}{NEXT}{FINAL}",
        ("hm\nhm", "yes\nyes", []),
    ),
    "a format of the text": (FINAL.replace("final", "final <|constrain|>json"), ("", "yes", [])),
    "white space before the headers": (f"\n{THOUGHT} {NEXT} {FINAL}", ("hm", "yes", [])),
    "no channel": ("<|message|>yes<|return|>", ("", "yes", [])),
    "no end of the thoughts": (f"{THOUGHT.removesuffix('<|end|>')}{NEXT}{FINAL}", ("hm", "yes", [])),
    "no start of the text": (f"{THOUGHT.removesuffix('<|end|>')}{FINAL}", ("hm", "yes", [])),
    "half a tag in a text": (FINAL.replace("yes", "a <| b <|end c < to="), ("", "a <| b <|end c < to=", [])),
    "a cut text": ("<|channel|>final<|message|>ye", ("", "ye", [])),
    "cut thoughts": ("<|channel|>analysis<|message|>h", ("h", "", [])),
    "a cut header": (f"{THOUGHT}{NEXT}<|channel|>fin", ("hm", "", [])),
    "nothing": ("", ("", "", [])),
    "an end at once": ("<|return|>", ("", "", [])),
}
CUT = CALL.removesuffix("<|call|>")
PYTHON = "<|channel|>commentary to=python code<|message|>1"
TEXTS: dict[str, tuple[str, str]] = {
    "no form": ("yes <3", "yes <3"),
    "no form, behind white space": (" \n yes", " \n yes"),
    "no form, with an end": ("yes<|return|>", "yes"),
    "what is no recipient": (" to", " to"),
    "arguments that are no JSON": (f"{CALLING}Ulm<|call|>", f"{CALLING}Ulm"),
    "arguments that are no object": (f"{CALLING}[1]<|call|>", f"{CALLING}[1]"),
    "no arguments": (f"{CALLING}<|call|>", CALLING),
    "no number of JSON": (f'{CALLING}{{"x": NaN}}<|call|>', f'{CALLING}{{"x": NaN}}'),
    "too deep": (f'{CALLING}{{"x": {"[" * 2_000}<|call|>', f'{CALLING}{{"x": {"[" * 2_000}'),
    "a call without an end": (CUT, CUT),
    "a tag within a call": (f"{CALLING}{{<|message|>}}<|call|>", f"{CALLING}{{<|message|>}}"),
    "no name": (f"{CALL}".replace("weather", ""), CUT.replace("weather", "")),
    "another recipient": (f"{PYTHON}<|call|>", PYTHON),
    "a header without a text": ("<|channel|>final yes<|return|>", "<|channel|>final yes"),
    "two starts": (f"<|channel|>x{NEXT}{FINAL}", "<|channel|>x\nyes"),
    "a header without an end": (f"<|channel|>{'x' * 300}", f"<|channel|>{'x' * 300}"),
    "another channel": (FINAL.replace("final", "x"), "yes"),
    "tags alone": ("<|constrain|><|channel|><|start|><|message|><|message|>", "<|constrain|><|channel|>\n<|message|>"),
}


def read(whole: str, size: int, begun: str = "", *, calls: bool = True, parallel: bool = True) -> list[Parts]:
    """The parts of an answer that comes in pieces of `size` characters, delta by delta."""
    answer = AnswerText(ParseOptions(parallel=parallel, harmony=HarmonyOptions(begun, calls)))
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)] or [""]
    deltas = [Delta(0, piece) for piece in pieces[:-1]] + [Delta(0, pieces[-1], finish="stop")]
    found = [answer.split(delta) for delta in deltas]
    return [(part.thoughts, part.text, [(one.name, json.loads(one.arguments)) for one in part.calls]) for part in found]


def parts(whole: str, size: int, begun: str = "", **options: bool) -> Parts:
    thoughts, texts, calls = zip(*read(whole, size, begun, **options), strict=True)
    return "".join(thoughts), "".join(texts), [*chain(*calls)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000_000])
@pytest.mark.parametrize("case", MESSAGES)
def test_each_message_of_an_answer_is_thoughts_text_or_a_call(case: str, size: int):
    whole, expected = MESSAGES[case]
    assert parts(whole, size) == expected


@pytest.mark.parametrize("size", [1, 3, 1_000_000])
@pytest.mark.parametrize("case", TEXTS)
def test_what_is_no_message_of_harmony_stays_text(case: str, size: int):
    whole, expected = TEXTS[case]
    assert parts(whole, size) == ("", expected, [])


def test_thoughts_and_text_are_streamed_as_they_come():
    found = read(f"{THOUGHT}{NEXT}{FINAL}", 1)
    assert [part[:2] for part in found if part[0] or part[1]] == [("h", ""), ("m", ""), ("", "y"), ("", "e"), ("", "s")]


def test_without_tools_a_call_is_text():
    assert parts(CALL, 5, calls=False) == ("", CUT, [])


def test_without_parallel_the_first_call_is_kept():
    assert parts(f"{CALL}{NEXT}{CALL}", 5, parallel=False)[2] == CALLED


@pytest.mark.parametrize("size", [1, 1_000_000])
@pytest.mark.parametrize(
    ("begun", "whole", "expected"),
    [
        (opened("a <", is_json=False) + "a <", "|b<|return|>", ("", "|b", [])),
        (opened("", is_json=True), '{"a": 1}<|return|>', ("", '{"a": 1}', [])),
        ("<|channel|>analysis<|message|>h", f"m<|end|>{NEXT}{FINAL}", ("m", "yes", [])),
        ("<|channel|>", "analysis<|message|>hm<|end|>", ("hm", "", [])),
    ],
)
def test_an_answer_continues_what_the_prompt_has_begun(begun: str, whole: str, expected: Parts, size: int):
    prompt = f"<|start|>user<|message|>{NEXT}<|end|>{NEXT}{begun}"
    assert HarmonyOptions.of(prompt, calls=True) == HarmonyOptions(begun, calls=True)
    assert parts(whole, size, begun) == expected


def test_a_prefill_with_a_header_of_its_own_gets_no_other():
    assert opened("<|channel|>analysis<|message|>h", is_json=False) == opened("", is_json=False) == ""


@pytest.mark.parametrize(
    "whole",
    [
        *("<|channel|>" * 50_000, "<|" * 200_000, "<|start|>x" * 50_000, f"{FINAL}{NEXT}" * 10_000, " t" * 200_000),
        *(CALLING + '{"' * 200_000, CALLING + "<|message|>" * 50_000, f"{CALL}?" * 5_000),
    ],
    ids=range(8),
)
def test_text_of_any_length_takes_linear_time(whole: str):
    """With quadratic time, these would take minutes."""
    thoughts, text, _ = parts(whole, 50)
    assert (thoughts, len(text) < 2 * len(whole)) == ("", True)


@pytest.mark.parametrize("template", ["", "<|start|>", "<|start|> <|channel>analysis <|message|>", "<tool_call>"])
def test_other_templates_are_not_in_harmony(template: str):
    assert not is_harmony(template)
    assert is_harmony("<|start|>assistant<|channel|>final<|message|>")


def turn(content: str = "", *calls: str, **more: Any) -> dict[str, Any]:
    asked = {"tool_calls": [{"id": name, "function": {"name": name, "arguments": {}}} for name in calls]}
    return {"role": "assistant", "content": content, **(asked if calls else {}), **more}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}


USER = {"role": "user", "content": "?"}


def test_each_call_of_a_turn_is_a_message_before_its_results():
    turns = [USER, turn("", "f", "g"), result("g"), result("f"), result("x"), USER, turn("", "f"), result("f")]
    assert for_harmony(turns) == [
        *(USER, turn("", "f"), result("f"), turn("", "g"), result("g"), result("x")),
        *(USER, turn("", "f"), result("f")),
    ]


@pytest.mark.parametrize(
    ("content", "thoughts", "expected"),
    [("wait", "hm", "hm\nwait"), ("wait", "", "wait"), ("", "hm", "hm")],
)
def test_the_text_beside_a_call_is_one_of_the_thoughts(content: str, thoughts: str, expected: str):
    given = {"reasoning_content": thoughts} if thoughts else {}
    first, second = for_harmony([turn(content, "f", "g", **given)])
    assert first == turn("", "f", thinking=expected, **given)
    assert second == turn("", "g")


def test_thoughts_of_a_turn_without_a_call_are_apart_from_its_text():
    given = {"reasoning_content": "hm"}
    assert for_harmony([turn("yes", **given)]) == [turn("yes", thinking="hm", **given)]


@pytest.mark.parametrize(
    "turns",
    [
        [result("f"), USER, result("f")],
        [turn("no"), {"role": "system", "content": "short"}],
        [{"role": "assistant", "content": [{"type": "image"}], "tool_calls": [{"id": ["f"], "function": {}}]}],
    ],
    ids=range(3),
)
def test_other_turns_stay_as_they_are(turns: list[dict[str, Any]]):
    assert for_harmony(turns) == turns

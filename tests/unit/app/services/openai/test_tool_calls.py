"""Recognition of tool calls in generated text, and the text that is streamed before them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from app.services.openai.tool_calls import OfferedTools, ToolText, format_of

PARAMETERS = {"town": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": PARAMETERS}}}]
ARGUMENTS = {"town": "Zürich", "days": 3}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)


class Family(NamedTuple):
    """A family of models: a part of its chat templates, a call, and two calls in one answer."""

    template: str
    call: str
    two: str


HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=town>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Zürich</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
LLAMA = f'{{"name": "weather", "parameters": {WRITTEN}}}'
LISTED = f'{{"name": "weather", "arguments": {WRITTEN}, "id": "a"}}'
NAMED = f"[TOOL_CALLS]weather[ARGS]{WRITTEN}"
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{WRITTEN}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>"
CALLS, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SAYS = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
FAMILIES = {
    "Hermes and Qwen": Family("<tool_call>", HERMES, f"{HERMES}\n{HERMES}"),
    "Qwen with XML": Family("<tool_call>\n<function=f>\n<parameter=x>", XML, f"{XML}\n{XML}"),
    "GLM": Family("<tool_call>{name}\n<arg_key>", GLM, f"{GLM}\n{GLM}".replace("</tool_call>\n", "</tool_call>")),
    "GLM without line breaks": Family("<tool_call>{name}<arg_key>", GLM.replace("\n", ""), GLM.replace("\n", "") * 2),
    "Llama": Family(SAYS, f"<|python_tag|>{LLAMA}", f"<|python_tag|>{LLAMA}; {LLAMA}"),
    "Mistral with a list": Family("[TOOL_CALLS]", f"[TOOL_CALLS] [{LISTED}]", f"[TOOL_CALLS] [{LISTED}, {LISTED}]"),
    "Mistral with names": Family("[TOOL_CALLS]", NAMED, NAMED + NAMED.replace("[ARGS]", "[CALL_ID]a[ARGS]")),
    "DeepSeek V3 and R1": Family(CALLS, f"{CALLS}{V3}{END}", f"{CALLS}{V3}\n{V3}{END}"),
    "DeepSeek V3.1": Family(CALLS, f"{CALLS}{V31}{END}", f"{CALLS}{V31}{V31}{END}"),
}


def offered(template: str) -> OfferedTools:
    form = format_of(template)
    assert form is not None
    return OfferedTools(form, TOOLS)


def read(template: str, whole: str, size: int) -> tuple[str, str, list[tuple[str, Any]]]:
    """The text of an answer before its end, the text at its end, and its calls. It comes in pieces of `size`
    characters."""
    text = ToolText(offered(template))
    shown = "".join(text.push(whole[i : i + size]) for i in range(0, len(whole), size))
    rest, calls = text.finish()
    return shown, rest, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_is_found_with_its_arguments_and_no_part_of_the_text(family: str, size: int):
    template, call, two = FAMILIES[family]
    said = "a < b [T], so:\n"
    assert read(template, said + call, size) == (said, "", [("weather", ARGUMENTS)])
    assert read(template, two, size) == ("", "", [("weather", ARGUMENTS)] * 2)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("behind", ["and more", "{", "\n]"])
def test_calls_with_text_behind_them_or_without_an_end_stay_text(family: str, size: int, behind: str):
    template, call, two = FAMILIES[family]
    for whole in (call + behind, two[:-1], f"so: {call[:-3]}", call.replace('{"', '{x"').replace("3", "3x")):
        shown, rest, calls = read(template, whole, size)
        assert (shown + rest, calls) == (whole, [])


@pytest.mark.parametrize("size", [1, 1000])
def test_llamas_call_begins_an_answer_without_a_tag(size: int):
    assert read(SAYS, f"\n{LLAMA}", size) == ("\n", "", [("weather", ARGUMENTS)])
    assert read(SAYS, f"so: {LLAMA}", size) == (f"so: {LLAMA}", "", [])


@pytest.mark.parametrize("size", [1, 1000])
def test_llamas_call_may_begin_a_line_behind_its_tag(size: int):
    assert read(SAYS, f"<|python_tag|>\n{LLAMA}", size) == ("", "", [("weather", ARGUMENTS)])


@pytest.mark.parametrize("answer", ['{"name": "Ulm", "parameters": {}}', '{"town": "Ulm"}', '{"name": 5}', "{}"])
def test_an_answer_in_json_is_no_call_of_llama(answer: str):
    assert read(SAYS, answer, 1) == ("", answer, [])


@pytest.mark.parametrize("text", ["", " \n", "hello", " hello {"])
def test_other_text_passes_at_once(text: str):
    for family in FAMILIES.values():
        shown, rest, calls = read(family.template, text, 1)
        assert (shown + rest, calls) == (text, [])
        assert text.strip() in shown


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("Qwen with XML", "<tool_call><function=weather></function></tool_call>"),
        ("GLM", "<tool_call>weather\n</tool_call>"),
    ],
)
def test_a_call_without_parameters_has_an_empty_object(family: str, call: str):
    assert read(FAMILIES[family].template, call, 1)[2] == [("weather", {})]


@pytest.mark.parametrize("template", ["", "{{ tools }}", "<function=f>", "<parameter=x>"])
def test_a_template_of_another_family_has_no_known_form(template: str):
    assert format_of(template) is None


HERMES_NO_CALLS = {
    "no JSON": "<tool_call>weather(Zürich)</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "arguments that are no object": '<tool_call>{"name": "a", "arguments": "b"}</tool_call>',
    "one of two": f"{HERMES}<tool_call>?</tool_call>",
    "a list": "<tool_call>[]</tool_call>",
    "a second begin": f"<tool_call>{HERMES}",
    "no number of JSON": '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    "a number beyond all": '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    "too deep": f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * 100_000}}}</tool_call>',
}
XML_NO_CALLS = {
    "no function": "<tool_call></tool_call>",
    "two functions": "<tool_call><function=f></function><function=f></function></tool_call>",
    "no name": "<tool_call><function=></function></tool_call>",
    "no end of a name": "<tool_call><function=f</function></tool_call>",
    "text between parameters": XML.replace("</parameter>\n<", "</parameter>and<"),
    "no number": XML.replace("3", "three"),
    "no number of JSON": XML.replace("days", "x").replace("3", "1e999"),
    "JSON": HERMES,
}
GLM_NO_CALLS = {
    "no name": GLM.replace("weather", ""),
    "no key": GLM.replace("days", ""),
    "no end of a key": GLM.replace("days</arg_key>", "days"),
    "no value": GLM.replace("<arg_value>3", "3"),
    "text before a value": GLM.replace("\n<arg_value>3", "and<arg_value>3"),
    "text behind a value": GLM.replace("3</arg_value>", "3</arg_value>and"),
    "no number": GLM.replace("3", "three"),
    "JSON": HERMES,
}
DEEPSEEK_NO_CALLS = {"two lists": f"{CALLS}{V31}{END}" * 2, "no name": f"{CALLS}{V31}{END}".replace("weather", "")}
NO_CALLS = [
    *(("Hermes and Qwen", text) for text in HERMES_NO_CALLS.values()),
    *(("Qwen with XML", text) for text in XML_NO_CALLS.values()),
    *(("GLM", text) for text in GLM_NO_CALLS.values()),
    *(("DeepSeek V3.1", text) for text in DEEPSEEK_NO_CALLS.values()),
    ("Mistral with a list", "[TOOL_CALLS][]"),
    ("Mistral with a list", "[TOOL_CALLS][1]"),
    ("Mistral with names", NAMED.replace("weather", "")),
    ("Mistral with names", NAMED.replace("weather", " ")),
    ("Mistral with names", NAMED.replace("[ARGS]", "")),
    ("Llama", "<|python_tag|>print(1)"),
]


@pytest.mark.parametrize("case", range(len(NO_CALLS)))
def test_what_is_no_call_stays_text(case: int):
    family, whole = NO_CALLS[case]
    shown, rest, calls = read(FAMILIES[family].template, whole, len(whole))
    assert (shown + rest, calls) == (whole, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_any_length_takes_linear_time(family: str):
    """With quadratic time, let alone cubic, these would not end."""
    template, call, _ = FAMILIES[family]
    begin = offered(template).form.tags[0]
    for whole in (begin + "\n" * 1_000_000, begin * 100_000, begin + "{" * 500_000, (call + "?") * 10_000):
        shown, rest, calls = read(template, whole, 100)
        assert (shown + rest, calls) == (whole, [])


class Counted(dict[str, Any]):
    """A part of a schema that counts how often it is read."""

    reads = 0

    def get(self, *args: Any) -> Any:
        self.reads += 1
        return super().get(*args)


@pytest.mark.parametrize(
    ("family", "argument"),
    [
        ("Qwen with XML", "<parameter=days>\n3\n</parameter>\n"),
        ("GLM", "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"),
    ],
)
def test_a_schema_is_read_once_for_all_arguments(family: str, argument: str):
    part = Counted(type="integer")
    declared = {"name": "weather", "parameters": {"properties": {"days": {"anyOf": [part]}}}}
    form = format_of(FAMILIES[family].template)
    assert form is not None
    reads = []
    for count in (1, 100):
        part.reads = 0
        (call,) = OfferedTools(form, [{"function": declared}]).parse(
            FAMILIES[family].call.replace(argument.strip(), argument * count)
        )
        assert json.loads(call.arguments)["days"] == 3
        reads.append(part.reads)
    assert reads[0] == reads[1] > 0


def test_a_fence_within_the_arguments_is_a_part_of_them() -> None:
    call = V31.replace("Zürich", "a ```json b``` c")
    assert read(CALLS, f"{CALLS}{call}{END}", 1000)[2] == [("weather", {"town": "a ```json b``` c", "days": 3})]

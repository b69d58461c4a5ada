"""Tool calls in generated text, in the forms that templates of Qwen, Hermes, GLM, Llama, Mistral and DeepSeek
teach.

A model may generate any text, of any length. The parsers take linear time and use no regular expression: one took cubic
time, and blocked all other threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.services.openai.generation import held_back
from app.services.openai.tool_arguments import Declared, Kinds, declared, read_value

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LLAMA = "<|python_tag|>"
# The bar and the underscore of these tags are not those of ASCII.
_DEEPSEEK = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of tool calls. A template that holds all `signs` teaches it. `tags`: the first one begins the calls; tags
    are part of the text even if they are special tokens. `bare`: an answer that begins with { may be a call, without a
    tag. `read` returns the calls that make up a text; it raises ValueError if the text holds anything else."""

    signs: Sequence[str]
    tags: Sequence[str]
    read: Callable[[str, Declared], list[ToolCall]]
    bare: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools offered to a model, in OpenAI's form, and the form of its calls."""

    form: ToolFormat
    tools: Sequence[Mapping[str, Any]] = ()

    def parse(self, text: str) -> list[ToolCall]:
        """The calls that make up `text`. None are returned if the text holds anything else."""
        try:
            return self.form.read(text.strip(), declared(self.tools))
        except (ValueError, RecursionError):
            return []


def format_of(template: str) -> ToolFormat | None:
    """The form of calls that a chat template teaches; None if the server does not know it."""
    return next((form for form in _FORMATS if all(sign in template for sign in form.signs)), None)


class ToolText:
    """Separates tool calls from text. Text passes up to the place where calls may begin. Everything after it is kept
    until it is complete, because it may still turn out not to be a call."""

    def __init__(self, offered: OfferedTools) -> None:
        self._offered = offered
        self._mark = offered.form.tags[0]
        self._at_start = offered.form.bare
        self._kept = ""
        self._calls: list[str] = []

    def push(self, text: str) -> str:
        """Adds text, and returns the text that is certainly not part of a call."""
        if self._calls:
            self._calls.append(text)
            return ""
        self._kept += text
        start = self._begin()
        if start >= 0:
            passed, self._kept, self._calls = self._kept[:start], "", [self._kept[start:]]
            return passed
        upto = len(self._kept) - held_back(self._kept, [self._mark])
        passed, self._kept = self._kept[:upto], self._kept[upto:]
        return passed

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(remaining text, calls); one of the two is empty."""
        kept = self._kept + "".join(self._calls)
        calls = self._offered.parse(kept)
        return ("", calls) if calls else (kept, [])

    def _begin(self) -> int:
        """The place in the kept text where calls begin, or -1."""
        if self._at_start and (begun := self._kept.lstrip()):
            self._at_start = False
            if begun.startswith("{"):
                return len(self._kept) - len(begun)
        return self._kept.find(self._mark)


def checked_call(name: Any, arguments: Any) -> ToolCall:
    """A call with the parsed arguments. Raises ValueError if it is none."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call is a name and an object")
    # Python reads NaN and numbers beyond a double's range, which are no JSON.
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _json_call(found: Any) -> ToolCall:
    """The call {"name": ..., "arguments": {...}}; Llama calls the arguments "parameters"."""
    if not isinstance(found, dict):
        raise ValueError("a call is an object")
    return checked_call(found.get("name"), found.get("arguments", found.get("parameters", {})))


def _of_tool(call: ToolCall, tools: Declared) -> ToolCall:
    """The call. Raises ValueError if no tool has its name."""
    if call.name not in tools:
        raise ValueError("no tool has this name")
    return call


def _between(text: str, begin: str, end: str) -> list[str]:
    """The texts between pairs of tags, with nothing but white space around the pairs. Raises ValueError."""
    *parts, behind = (part.lstrip() for part in text.split(end))
    if behind or not all(part.startswith(begin) for part in parts):
        raise ValueError("text beside the tags")
    return [part.removeprefix(begin) for part in parts]


def _split(text: str, mark: str) -> tuple[str, str]:
    """The texts before and after the first `mark`. Raises ValueError without a mark, or without text before it."""
    before, found, after = text.partition(mark)
    if not before or not found:
        raise ValueError(f"no text before {mark}")
    return before, after


def _hermes(text: str, _: Declared) -> list[ToolCall]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    return [_json_call(json.loads(part)) for part in _between(text, _CALL, _CALL_END)]


def _qwen_xml(text: str, tools: Declared) -> list[ToolCall]:
    """<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>"""
    calls = []
    for part in _between(text, _CALL, _CALL_END):
        (function,) = _between(part, "<function=", "</function>")
        name, inside = _split(function, ">")
        kinds = tools.get(name, {})
        parameters = [_split(one, ">") for one in _between(inside, "<parameter=", "</parameter>")]
        calls.append(checked_call(name, {key: read_value(value, kinds.get(key, Kinds())) for key, value in parameters}))
    return calls


def _glm(text: str, tools: Declared) -> list[ToolCall]:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>. A name has no tag of its own, so
    it must be that of a tool."""
    calls = []
    for part in _between(text, _CALL, _CALL_END):
        name, key, rest = part.partition(_KEY)
        kinds, arguments = tools.get(name.strip(), {}), {}
        for head, value in (_split(pair, _VALUE) for pair in _between(key + rest, _KEY, _VALUE_END)):
            key, behind = _split(head, _KEY_END)
            if behind.strip():
                raise ValueError("text between a key and its value")
            arguments[key] = read_value(value, kinds.get(key, Kinds()))
        calls.append(_of_tool(checked_call(name.strip(), arguments), tools))
    return calls


def _llama(text: str, tools: Declared) -> list[ToolCall]:
    """{"name": ..., "parameters": {...}}, several with ; between them, with or without a tag before them. An answer may
    be JSON without being a call, so the name must be that of a tool."""
    calls, rest = [], text.removeprefix(_LLAMA).lstrip()
    place, decoder = 0, json.JSONDecoder()
    while place < len(rest):
        found, place = decoder.raw_decode(rest, place)
        calls.append(_of_tool(_json_call(found), tools))
        while place < len(rest) and (rest[place].isspace() or rest[place] == ";"):
            place += 1
    return calls


def _mistral(text: str, _: Declared) -> list[ToolCall]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...} of newer models."""
    parts = text.split(_MISTRAL)[1:]
    if len(parts) == 1 and parts[0].lstrip().startswith("["):
        found = json.loads(parts[0])
        return [_json_call(call) for call in found]
    pairs = [_split(part, _MISTRAL_ARGUMENTS) for part in parts]
    return [checked_call(name.partition(_MISTRAL_ID)[0].strip(), json.loads(arguments)) for name, arguments in pairs]


def _deepseek(text: str, _: Declared) -> list[ToolCall]:
    """NAME, a separator and {...} between tags; V3 and R1 have `function`, the separator, NAME and a block of JSON."""
    begin, end, call_begin, call_end, separator = _DEEPSEEK
    (inside,) = _between(text, begin, end)
    calls = []
    for part in _between(inside, call_begin, call_end):
        name, arguments = _split(part, separator)
        if arguments.rstrip().endswith("```"):
            name, arguments = _split(arguments.rstrip().removesuffix("```"), "```json")
        calls.append(checked_call(name.strip(), json.loads(arguments)))
    return calls


# The first one that a template teaches is taken: templates of Qwen with XML and of GLM hold the tag of Hermes too.
_FORMATS = (
    ToolFormat([_CALL, _KEY], [_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END], _glm),
    ToolFormat([_CALL, "<parameter="], [_CALL, _CALL_END], _qwen_xml),
    ToolFormat([_CALL], [_CALL, _CALL_END], _hermes),
    ToolFormat([_MISTRAL], [_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGUMENTS], _mistral),
    ToolFormat([_DEEPSEEK[0]], _DEEPSEEK, _deepseek),
    ToolFormat(['{"name": function name, "parameters":'], [_LLAMA], _llama, bare=True),
)

"""Chats in harmony, the form of gpt-oss: its answers, and earlier turns as its chat templates take them.

An answer is a sequence of messages. The header of a message names its channel, and the recipient of a tool call:
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any

from app.services.openai.generation import held_back
from app.services.openai.tool_calls import ToolCall, checked_call

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
STOPS = ("<|return|>", "<|call|>")
"""The tags that end an answer."""
_ENDS = ("<|end|>", *STOPS)
TAGS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_TO, _FUNCTION = " to=", "to=functions."
# Most characters of a header. The name of a tool has up to 64.
_HEADER = 256


def is_harmony(template: str) -> bool:
    """True for a chat template that teaches harmony."""
    return all(tag in template for tag in (_START, _CHANNEL, _MESSAGE))


def opened(prefill: str, *, is_json: bool) -> str:
    """The header between a template's text and an answer that has none of its own, which is then a final message."""
    return _FINAL if is_json or (prefill and not prefill.startswith(TAGS)) else ""


def for_harmony(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages in the templates' form, with thoughts in `thinking`. Templates of gpt-oss take one tool call a message,
    with its results behind it."""
    turns: list[list[Mapping[str, Any]]] = []
    calls: dict[str, list[Mapping[str, Any]]] = {}
    for message in messages:
        if message["role"] == "tool" and turns:
            calls.get(message.get("tool_call_id", ""), turns[-1]).append(message)
            continue
        new = [[part] for part in _parts(message)]
        calls = {str(call.get("id")): turn for turn in new for call in turn[0].get("tool_calls", ())}
        turns += new
    return list(chain.from_iterable(turns))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The message, or one for each of its calls. Templates refuse text beside thoughts and a call, so the text is one
    of the thoughts then."""
    content, calls = message["content"], message.get("tool_calls") or []
    thoughts = message.get("reasoning_content", "")
    if calls and isinstance(content, str):
        thoughts, content = "\n".join(part for part in (thoughts, content) if part), ""
    first = {**message, "content": content, **({"thinking": thoughts} if thoughts else {})}
    if not calls:
        return [first]
    rest = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls[1:]]
    return [{**first, "tool_calls": calls[:1]}, *rest]


@dataclass(frozen=True, slots=True)
class HarmonyOptions:
    """How an answer is read. `begun`: the end of the prompt, from the header of the answer on. With `calls` the answer
    is searched for tool calls."""

    begun: str = ""
    calls: bool = False

    @classmethod
    def of(cls, prompt: str, *, calls: bool) -> HarmonyOptions:
        """The options for an answer to this prompt, which ends in the beginning of a message."""
        return cls(prompt.rpartition(f"{_START}assistant")[2], calls)


class _State(Enum):
    """The place in an answer: before a message, in its header, or in the text of one of three kinds."""

    BEFORE = auto()
    HEADER = auto()
    THOUGHTS = auto()
    TEXT = auto()
    CALL = auto()


_Shown = tuple[_State, str]
_NOTHING: _Shown = (_State.TEXT, "")


class HarmonyText:
    """Separates the messages of one answer. Thoughts are on the channel `analysis`. A call is kept until its end, and
    is text if its arguments are no JSON. A message to anyone but a function is text, with its header. The message of
    any other header is text without it, and so is a text without a header. Takes linear time."""

    def __init__(self, options: HarmonyOptions) -> None:
        self._reads_calls = options.calls
        self._state = _State.BEFORE
        self._kept = ""  # may become a tag
        self._raw: list[str] = []  # the header, and then the text of a call
        self._name, self._arguments = "", 0  # of a call: its function, and the place of its arguments in `_raw`
        self._is_new = True  # no text of this message is shown yet
        self._seen: set[_State] = set()
        self._calls: list[ToolCall] = []
        self._read(options.begun)

    def push(self, text: str) -> tuple[str, str]:
        """Adds text, and returns the (thoughts, text) that are certain by now. A line break is between two messages of
        a kind."""
        text = self._kept + text
        upto = len(text) - held_back(text, (*TAGS, _TO))
        self._kept = text[upto:]
        return self._read(text[:upto])

    def finish(self) -> tuple[str, str, list[ToolCall]]:
        """The rest of (thoughts, text), and all calls. A header that is cut off is left out, a call is text."""
        thoughts, text = self._read(self._kept)
        _, rest = self._release() if self._state is _State.CALL else _NOTHING
        return thoughts, text + rest, self._calls

    def _read(self, text: str) -> tuple[str, str]:
        shown = [self._tag(piece) if piece in TAGS else self._text(piece) for piece in _pieces(text)]
        thoughts, answer = ([text for kind, text in shown if kind is one] for one in (_State.THOUGHTS, _State.TEXT))
        return "".join(thoughts), "".join(answer)

    def _text(self, piece: str) -> _Shown:
        if self._state is _State.BEFORE and piece.isspace():
            self._raw.append(piece)  # no text if a tag follows
            return _NOTHING
        if self._state is _State.BEFORE:
            self._state = _State.HEADER if piece.startswith(_TO) else _State.TEXT
            piece = "".join((*self._raw, piece))
            self._raw.clear()
        if self._state in (_State.THOUGHTS, _State.TEXT):
            return self._show(piece)
        self._raw.append(piece)
        if self._state is _State.HEADER and sum(map(len, self._raw)) > _HEADER:
            return self._release()
        return _NOTHING

    def _tag(self, tag: str) -> _Shown:
        if self._state is _State.BEFORE:
            self._raw.clear()
        heads = self._state in (_State.BEFORE, _State.HEADER)
        if tag == _MESSAGE and heads:
            return self._open()
        if tag in (_MESSAGE, _CONSTRAIN) and not heads:
            return self._text(tag)
        shown = _NOTHING if heads and tag in (_CHANNEL, _CONSTRAIN) else self._close()
        if tag in _ENDS:
            self._state = _State.BEFORE
        else:
            self._state = _State.HEADER
            self._raw.append(tag)
        return shown

    def _open(self) -> _Shown:
        """Begins the text of a message, by its header."""
        words = "".join(" " if piece in TAGS else piece for piece in self._raw).split()
        recipient = next((word for word in words if word.startswith(_TO.strip())), None)
        self._raw.append(_MESSAGE)
        if self._reads_calls and recipient and recipient.startswith(_FUNCTION):
            self._state = _State.CALL
            self._name, self._arguments = recipient.removeprefix(_FUNCTION), len(self._raw)
            return _NOTHING
        if "analysis" not in words and recipient:
            return self._release()
        self._state = _State.THOUGHTS if "analysis" in words else _State.TEXT
        self._raw.clear()
        return _NOTHING

    def _close(self) -> _Shown:
        """Ends a message. A header without a text is text itself."""
        if self._state is _State.CALL:
            try:
                self._calls.append(checked_call(self._name, json.loads("".join(self._raw[self._arguments :]))))
                self._raw.clear()
            except (ValueError, RecursionError):
                pass
        shown = self._release()
        self._is_new = True
        return shown

    def _release(self) -> _Shown:
        """Shows what was kept as text."""
        raw = "".join(self._raw)
        self._raw.clear()
        self._state = _State.TEXT
        return self._show(raw)

    def _show(self, text: str) -> _Shown:
        between = "\n" if text and self._is_new and self._state in self._seen else ""
        if text:
            self._is_new = False
            self._seen.add(self._state)
        return self._state, between + text


def _pieces(text: str) -> Iterator[str]:
    """The tags in `text`, and the texts between them."""
    begin = place = 0
    while (place := text.find("<|", place)) >= 0:
        tag = next((tag for tag in TAGS if text.startswith(tag, place)), "")
        if tag:
            yield from filter(None, (text[begin:place], tag))
            begin = place + len(tag)
        place += len(tag) or 2
    if begin < len(text):
        yield text[begin:]

"""The parts of a chat's answer: the model's thoughts, its text and its tool calls.

Models that think write their thoughts between <think> tags before the answer. Some templates open the tag in the
prompt. harmony.py reads the answers of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from app.services.openai.generation import Delta, held_back
from app.services.openai.harmony import TAGS, HarmonyOptions, HarmonyText
from app.services.openai.tool_calls import OfferedTools, ToolCall, ToolText

_OPEN, _CLOSE = "<think>", "</think>"


class Thoughts(Enum):
    """The place of thoughts in an answer: nowhere, at its beginning after a tag, or at its beginning without one."""

    NONE = 0
    TAGGED = 1
    OPENED = 2


def thoughts_of(template: str, text: str, prefill: str) -> Thoughts:
    """The place of thoughts in the answer to a prompt, which is `text` and `prefill`."""
    if _CLOSE not in template:
        return Thoughts.NONE
    begun = (_OPEN if text.rstrip().endswith(_OPEN) else "") + prefill
    return Thoughts.OPENED if begun.rfind(_OPEN) > begun.rfind(_CLOSE) else Thoughts.TAGGED


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How an answer is read. With `tools` its text is searched for calls of them. Without `parallel`, the first call of
    an answer is kept. Without `separate`, the thoughts stay in the text, with their tags. An answer in harmony has
    `harmony` instead of `thoughts` and `tools`."""

    thoughts: Thoughts = Thoughts.NONE
    tools: OfferedTools | None = None
    parallel: bool = True
    separate: bool = True
    harmony: HarmonyOptions | None = None

    @property
    def tags(self) -> Sequence[str]:
        """The tags that are part of the text even if they are special tokens."""
        if self.harmony:
            return TAGS
        return self.tools.form.tags if self.tools else ()


class Parts(NamedTuple):
    """The parts of an answer that are certain with a delta. Calls come with its last one."""

    thoughts: str
    text: str
    calls: list[ToolCall]


class AnswerText:
    """Separates the text of one answer into its parts."""

    def __init__(self, options: ParseOptions) -> None:
        self._parallel = options.parallel
        self._reader = HarmonyText(options.harmony) if options.harmony else TaggedText(options)

    def split(self, delta: Delta) -> Parts:
        """The parts that are certain with this delta of the answer."""
        thoughts, text = self._reader.push(delta.text)
        if not delta.finish:
            return Parts(thoughts, text, [])
        more_thoughts, more, calls = self._reader.finish()
        return Parts(thoughts + more_thoughts, text + more, calls if self._parallel else calls[:1])


class TaggedText:
    """Separates thoughts at the beginning of an answer, unless they stay in the text, and tool calls at its end from
    the text."""

    def __init__(self, options: ParseOptions) -> None:
        self._separate = options.separate
        self._thoughts = (ThoughtText if options.separate else UncutThoughts)(options.thoughts)
        self._tools = ToolText(options.tools) if options.tools else None

    def push(self, text: str) -> tuple[str, str]:
        """Adds text, and returns the (thoughts, text) that are certain by now."""
        thoughts, text = self._thoughts.push(text)
        return self._shown(thoughts, self._tools.push(text) if self._tools else text)

    def finish(self) -> tuple[str, str, list[ToolCall]]:
        """The rest of (thoughts, text), and the calls."""
        thoughts, text = self._thoughts.finish()
        if self._tools is None:
            return *self._shown(thoughts, text), []
        text = self._tools.push(text)
        more, calls = self._tools.finish()
        return *self._shown(thoughts, text + more), calls

    def _shown(self, thoughts: str, text: str) -> tuple[str, str]:
        return (thoughts, text) if self._separate else ("", thoughts + text)


class ThoughtText:
    """Separates thoughts from the text after them. Line breaks around the thoughts belong to neither."""

    def __init__(self, place: Thoughts) -> None:
        self._place = place
        self._held: list[str] = []  # white space before the kept text, in pieces: no delta reads it again
        self._kept = ""
        self._at_start = place is not Thoughts.NONE

    def push(self, text: str) -> tuple[str, str]:
        """Adds text, and returns the (thoughts, text) that are certain by now."""
        self._kept += text
        if self._place is Thoughts.TAGGED:
            self._open()
        thoughts = self._think() if self._place is Thoughts.OPENED else ""
        return thoughts, self._answer() if self._place is Thoughts.NONE else ""

    def finish(self) -> tuple[str, str]:
        """The (thoughts, text) that might have become a tag."""
        rest = self._released() + self._kept
        if self._place is Thoughts.OPENED:
            return (rest.lstrip("\n") if self._at_start else rest).rstrip("\n"), ""
        return "", rest

    def _open(self) -> None:
        begun = self._kept.lstrip()
        if not begun:
            self._held.append(self._kept)
            self._kept = ""
        elif begun.startswith(_OPEN):
            self._held.clear()
            self._place, self._kept = Thoughts.OPENED, begun.removeprefix(_OPEN)
        elif not _OPEN.startswith(begun):
            self._place, self._at_start, self._kept = Thoughts.NONE, False, self._released() + self._kept

    def _think(self) -> str:
        found = self._kept.find(_CLOSE)
        upto = found if found >= 0 else len(self._kept) - held_back(self._kept, [_CLOSE])
        inside, self._kept = self._kept[:upto], self._kept[upto:]
        shown = inside.rstrip("\n")
        breaks = inside[len(shown) :]
        if shown:
            shown = self._released() + shown
            shown = shown.lstrip("\n") if self._at_start else shown
            self._at_start = False
        self._held.append(breaks)
        if found >= 0:
            self._held.clear()
            self._place, self._at_start, self._kept = Thoughts.NONE, True, self._kept.removeprefix(_CLOSE)
        return shown

    def _released(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    def _answer(self) -> str:
        shown, self._kept = self._kept.lstrip("\n") if self._at_start else self._kept, ""
        self._at_start = self._at_start and not shown
        return shown


class UncutThoughts:
    """Separates thoughts from the text after them, and keeps every character: their tags, and all white space."""

    def __init__(self, place: Thoughts) -> None:
        self._place = place
        self._kept = ""

    def push(self, text: str) -> tuple[str, str]:
        """Adds text, and returns the (thoughts, text) that are certain by now."""
        self._kept += text
        before = self._open() if self._place is Thoughts.TAGGED else ""
        thoughts = before + (self._think() if self._place is Thoughts.OPENED else "")
        if self._place is not Thoughts.NONE:
            return thoughts, ""
        text, self._kept = self._kept, ""
        return thoughts, text

    def finish(self) -> tuple[str, str]:
        """The (thoughts, text) that might have become a tag."""
        return (self._kept, "") if self._place is Thoughts.OPENED else ("", self._kept)

    def _open(self) -> str:
        """The white space before the tag or the text."""
        begun = self._kept.lstrip()
        space, self._kept = self._kept[: len(self._kept) - len(begun)], begun
        if begun.startswith(_OPEN):
            self._place = Thoughts.OPENED
        elif not _OPEN.startswith(begun):
            self._place = Thoughts.NONE
        return space

    def _think(self) -> str:
        found = self._kept.find(_CLOSE)
        upto = found + len(_CLOSE) if found >= 0 else len(self._kept) - held_back(self._kept, [_CLOSE])
        thoughts, self._kept = self._kept[:upto], self._kept[upto:]
        self._place = Thoughts.NONE if found >= 0 else Thoughts.OPENED
        return thoughts

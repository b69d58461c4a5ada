"""Output of the commands. Control characters in text of users, logs and stores are shown, not sent to the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import Any, TextIO

_TAB = "\t"
_COLUMNS = 80


def visible(text: str, keep: str = "") -> str:
    r"""The text with an escape such as \x1b or \u202e in place of each character that a terminal would not just show:
    control characters, line breaks, and those that hide or reorder text. Characters in `keep` stay."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def row(*cells: str) -> str:
    """A line of a table. No cell can begin another cell or line."""
    return _TAB.join(map(visible, cells))


def wrapped(text: str, indent: int = 0) -> list[str]:
    """The text in lines of at most 80 characters, or of the terminal's width; `indent` spaces begin all but the first.
    A longer path stays whole."""
    return textwrap.wrap(
        visible(text),
        width=max(shutil.get_terminal_size((_COLUMNS, 24)).columns, _COLUMNS),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(number: int, noun: str) -> str:
    """The number and its noun, such as "1 run" and "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines to `file` (default stdout) at once; a tab stays."""
    for line in lines:
        print(visible(line, _TAB), file=file or sys.stdout, flush=True)


def show_json(document: Any) -> None:
    """Prints a JSON document, indented for people."""
    show(*json.dumps(document, indent=2).splitlines())


def warn(text: str) -> None:
    """Prints text to stderr, if anybody can still read it; the lines of the text stay lines."""
    with suppress(OSError):  # the terminal has hung up, or the program behind a pipe has ended
        show(*text.split("\n"), file=sys.stderr)

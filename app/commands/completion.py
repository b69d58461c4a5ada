"""`tinsmith completion`: prints the script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab


def completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Prints the script for `parser` and its subcommands."""
    _prepare(parser)
    print(shtab.complete(parser, shell), flush=True)
    return 0


def _prepare(parser: argparse.ArgumentParser) -> None:
    """Completes options that take a path, and shows the short help of each command, as `--help` does, in place of its
    description of several sentences."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for named in action._choices_actions:
                action.choices[named.dest].description = named.help
                _prepare(action.choices[named.dest])
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it

"""docs/sdk.md names a test for each public method of the SDK's clients and each command of its CLI.

The list of methods and commands comes from the SDK itself, so that a new one without a row fails here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import tinker
from tinker.cli.__main__ import main_cli

ROOT = Path(__file__).parents[2]
CLIENTS = [getattr(tinker, name) for name in tinker.__all__ if re.fullmatch("(?!Backcompat).*Client", name)]
FUTURE = [tinker.APIFuture]
_ROW = re.compile(r"^\| `(?P<what>[^`]+)` \| (?P<shown>[^|]+) \|$", re.MULTILINE)
_NOT_YET = "not yet"


def methods() -> set[str]:
    return {
        f"{client.__name__}.{name}"
        for client in CLIENTS + FUTURE
        for name, _ in inspect.getmembers(client)
        if not name.startswith("_")
    }


def commands(group: click.Group = main_cli, path: str = "tinker") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from commands(found, f"{path} {name}")
        else:
            yield f"{path} {name}"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    text = (ROOT / "docs" / "sdk.md").read_text()
    return {row["what"]: row["shown"].strip() for row in _ROW.finditer(text)}


@cache
def top_level(file: str) -> dict[str, ast.AST]:
    """Top-level definitions of a test's module, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse((ROOT / "tests" / "contract" / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                found[target.id] = node
    return found


def said_by(file: str, test: str) -> tuple[set[str], set[str]]:
    """Attributes and words that a test uses, directly or through definitions of its module."""
    names, attributes, words, seen = [test], set(), set(), set()
    while names:
        name = names.pop()
        if name in seen or name not in top_level(file):
            continue
        seen.add(name)
        for node in ast.walk(top_level(file)[name]):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
            elif isinstance(node, ast.Name):
                names.append(node.id)
            elif isinstance(node, ast.arg):
                names.append(node.arg)
            elif isinstance(node, ast.Constant):
                words.add(node.value)
    return attributes, words


def test_every_method_and_command_has_a_row_and_no_other_has(rows: dict[str, str]):
    assert set(rows) == methods() | set(commands())


def test_the_test_in_a_row_is_there_and_uses_what_it_shows(rows: dict[str, str]):
    wrong = {}
    for what, shown in rows.items():
        if shown.startswith(_NOT_YET):
            continue
        file, _, test = shown.strip("`").partition("::")
        attributes, words = said_by(file, test)
        uses = what.split()[1:] if " " in what else [what.partition(".")[2]]
        if not set(uses) <= (words if " " in what else attributes):
            wrong[what] = shown
    assert wrong == {}


@pytest.mark.parametrize("kind", ["methods", "commands"])
def test_so_many_are_shown(rows: dict[str, str], kind: str, capsys: pytest.CaptureFixture[str]):
    every = methods() if kind == "methods" else set(commands())
    missing = {what for what in every if rows[what].startswith(_NOT_YET)}
    with capsys.disabled():
        print(f"\nSDK {tinker.__version__}: {len(every - missing)} of {len(every)} {kind} shown")
    assert missing == set()

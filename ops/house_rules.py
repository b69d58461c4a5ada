"""Checks sizes of folders and modules, names of classes and functions, and wording: `python -m ops.house_rules`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_CODE = ("app", "workers")
_PROSE = (*_CODE, "ops", "tests")
_MOST_MODULES, _MOST_LINES = 15, 400
_GENERATED = "_pb2.py"
# The commands `python -m workers.trainer`, `celery -A workers.celery_app` and their like are public.
_ENTRIES = {"__init__.py", "celery_app.py", "cli.py", "flower.py", "node.py", "sampler.py", "trainer.py"}
_CLAUSE = re.compile(r"(What|Who|Whose|Whom|How|Which|Where|When|Whether)\b")
_RIDDLES = re.compile(r"\b(is told|are told|is let in|are let in|must miss it|whom|doorbells?)\b", re.IGNORECASE)
# Home-made nouns that the code had once, in place of the field's terms.
_HOME_MADE = re.compile(
    r"_*(Ahead|Books|Chore|Doorbell|Drawer|Endings|Gate|Handovers|Holds|Latest|NotNow|Pace|Parked|Presence|Pulse"
    r"|Reading|Ringing|Rung|Shares|Spread|Standings|Standstill|Tidying|Trunk|Turns|Unowned|Valuing|Watches|WholeState"
    r"|hand_over|let_go|let_in|moved_on|part_with|ring|rung|see_to_saves|stands_still_s)"
)


def main() -> int:
    """Print every broken rule as `path:line: what to do`; 1 if there is one."""
    found = list(broken(Path.cwd()))
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


def broken(root: Path) -> Iterator[str]:
    """The broken rules of a checkout."""
    code = [path for path in _modules(root, _CODE) if not path.name.endswith(_GENERATED)]
    yield from (f"{place}: {text}" for place, text in _too_large(root, code))
    for path in sorted((root / "workers").glob("*.py")):
        if path.name not in _ENTRIES:
            yield f"workers/{path.name}: only entry points lie here; move it into a folder"
    for path in code:
        for line, name in _home_made(path.read_text()):
            yield f"{path.relative_to(root)}:{line}: {name!r} is home-made; use the field's term (CONTRIBUTING.md)"
    for path in _modules(root, _PROSE):
        for line, text in _badly_worded(path.read_text()):
            yield f"{path.relative_to(root)}:{line}: {text}"


def _modules(root: Path, folders: tuple[str, ...]) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def _too_large(root: Path, modules: list[Path]) -> Iterator[tuple[str, str]]:
    folders = Counter(path.parent for path in modules if path.name != "__init__.py")
    for folder, count in folders.items():
        if count > _MOST_MODULES:
            yield str(folder.relative_to(root)), f"{count} modules; a folder has at most {_MOST_MODULES}"
    for path in modules:
        lines = len(path.read_text().splitlines())
        if lines > _MOST_LINES:
            yield str(path.relative_to(root)), f"{lines} lines; a module has at most {_MOST_LINES}"


def _home_made(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and _HOME_MADE.fullmatch(node.name):
            yield node.lineno, node.name


def _badly_worded(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    if _CLAUSE.match(ast.get_docstring(tree) or ""):
        yield 1, "a module's docstring says what the module is and does, subject first"
    for line, text in [*_docstrings(tree), *_comments(source)]:
        for riddle in _RIDDLES.findall(text):
            yield line, f"{riddle!r}: say it with the field's word (CONTRIBUTING.md)"


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


if __name__ == "__main__":
    sys.exit(main())

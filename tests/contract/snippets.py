"""Blocks of code in README.md and docs/: programs, settings, commands and output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.contract.stack import API_KEY, BASE, Stack

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4,}\S.*\n+)+")
# A first line of one of these begins a block that nobody types.
_SHOWN = ("{", "<", "tinker SDK ──HTTP──▶", "services:")
# Names in the pages, and those of the stack under test.
_MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-0.6B")
_SERVERS = ("http://127.0.0.1:8000", "http://tinsmith.example.org:8000")


@dataclass(frozen=True)
class Block:
    """A block of a page. `kind` is python, toml, shell or shown."""

    page: str
    kind: str
    text: str

    @property
    def title(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"


def blocks() -> list[Block]:
    """Every block of every page, in order; a page's fenced ones first."""
    return [block for page in PAGES for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for language, found in _FENCED.findall(text):
        yield Block(page.name, {"json": "shown", "text": "shown"}.get(language, language), found)
    for found in _INDENTED.findall(_FENCED.sub("", text)):
        inner = dedent(found).strip() + "\n"
        kind = "shown" if inner.startswith(_SHOWN) else "toml" if inner.startswith("[") else "shell"
        yield Block(page.name, kind, inner)


def as_here(text: str, stack: Stack) -> str:
    """The text with the URL and the base model of the stack."""
    for model in _MODELS:
        text = text.replace(model, BASE)
    for server in _SERVERS:
        text = text.replace(server, stack.url)
    return text


def run(command: list[str], stack: Stack, folder: Path) -> str:
    """Runs a command in a folder where the stack's data, its model and `tinsmith` are found; returns the output."""
    _furnish(folder, stack)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    environment = {**inherited, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONWARNINGS"] = "error::FutureWarning"  # a documented program uses nothing that the SDK gives up
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _furnish(folder: Path, stack: Stack) -> None:
    data = folder / "tinsmith-data"
    data.mkdir()
    for entry in stack.data_dir.iterdir():
        (data / entry.name).symlink_to(entry)
    # The stack was given a key, so it keeps none itself.
    (data / "api-key").write_text(API_KEY)
    model = folder / BASE
    model.parent.mkdir()
    model.symlink_to(stack.base_path)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, arguments in (("tinsmith", "-m app.cli"), ("python", "")):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {arguments} "$@"\n')
        program.chmod(0o755)

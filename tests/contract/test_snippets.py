"""Every program, settings file and command in README.md and docs/ runs, or is in a short list that says where else."""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from app.settings import parse
from tests.contract.snippets import Block, as_here, blocks, run
from tests.contract.stack import Stack

on_a_stack = pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)

# Reasons by the beginning of a block's title. A page's name alone stands for all its blocks of that kind.
ELSEWHERE = {
    "README.md: import tinker": "test_readme.py runs it on two stacks",
    "README.md: sudo apt install": "tests/first_hour/demo.py runs `make demo` in CI",
    "README.md: make test": "CI runs it, and this test in it",
    "README.md: make setup": "`make demo` does it; the fixture of these tests runs `tinsmith up`",
    "README.md: .venv/bin/tinsmith init": "a download of 1.2 GB; the fixture runs `tinsmith up` with a tiny model",
    "anthropic.md: export ANTHROPIC": "the reader's own program",
    "captures.md: import": "tests/unit/app/api/chat/test_captures.py trains on kept answers",
    "checkpoints.md: from pathlib": "test_resuming.py runs it, and again from its second step",
    "containers.md": "Docker and the network; `make compose-train` runs the same stack",
    "examples.md": "test_examples.py runs each example",
    "flower.md": "it runs until it is stopped; test_flower.py runs it",
    "imports.md: tinsmith import": "test_imports.py runs it on adapters of its own",
    "kubernetes.md": "a cluster; tests/unit/ops/helm and test_autoscaling.py run what needs none",
    "openai.md: client.chat.completions.create(": "test_openai.py asks a sampler that can answer so",
    "quickstart.md": "test_quickstart.py runs the page",
    "router-replay.md: import tinker": "test_router_replay.py runs it on a model with experts",
    "servers.md: mkdir /srv/objects": "root, and a group of the reader's",
    "setup.md": "the reader's own file, runs and calls; tests/unit/app/commands runs each command",
}
# Names that the reader replaces.
FILLED = {"project-1a2b3c4d5e6f": "$PROJECT", "0f1e2d3c4b5a": "$KEY_ID", " KEY_ID ": " $KEY_ID "}
# The names of the accounts that a page starts with.
ACCOUNTS = """
ORG=$(tinsmith admin org create Kettles)
PROJECT=$(tinsmith admin project create pots --org $ORG)
MEMBER=$(tinsmith admin user create "$RANDOM@example.org" --org $ORG)
tinsmith admin user role $MEMBER $PROJECT member
KEY=$(tinsmith admin key create --user $MEMBER --name desk)
KEY_ID=${KEY#tml-}
KEY_ID=${KEY_ID%%.*}
"""


def elsewhere(block: Block) -> list[str]:
    return [name for name in ELSEWHERE if block.title.startswith(name)]


def pages(kind: str) -> dict[str, str]:
    """The blocks of each page that run here, one after the other as a reader copies them."""
    found: dict[str, str] = defaultdict(str)
    for block in blocks():
        if block.kind == kind and not elsewhere(block):
            found[block.page] += block.text
    return dict(found)


def test_each_block_is_of_a_kind_that_is_tested_or_shown_and_each_exception_is_a_block():
    assert {block.title for block in blocks() if block.kind not in ("python", "toml", "shell", "shown")} == set()
    assert {name for block in blocks() for name in elsewhere(block)} == ELSEWHERE.keys()


SETTINGS = [block for block in blocks() if block.kind == "toml"]


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.page)
def test_settings_are_valid(block: Block):
    first = '[[base_models]]\nname = "base"\npath = "/models/base"\n'
    needs_it = "[base_models." in block.text and "[[base_models]]" not in block.text
    parse(tomllib.loads((first if needs_it else "") + block.text), block.page)


PYTHON, SHELL = pages("python"), pages("shell")


@on_a_stack
@pytest.mark.parametrize("page", PYTHON)
def test_the_programs_of_a_page_run(stack: Stack, page: str, tmp_path: Path):
    run([sys.executable, "-c", as_here(PYTHON[page], stack)], stack, tmp_path)


@on_a_stack
@pytest.mark.parametrize("page", SHELL)
def test_the_commands_of_a_page_run(stack: Stack, page: str, tmp_path: Path):
    script = as_here(SHELL[page], stack)
    accounts = ACCOUNTS if any(name in script for name in FILLED) else ""
    for there, here in FILLED.items():
        script = script.replace(there, here)
    run(["bash", "-euo", "pipefail", "-c", accounts + script], stack, tmp_path)

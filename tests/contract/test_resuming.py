"""The program of docs/checkpoints.md goes on from the checkpoint in its file, to the bits of an undisturbed run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contract.snippets import as_here, blocks, run
from tests.contract.stack import Stack


@pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
def test_the_program_of_the_page_repeats_the_steps_after_its_checkpoint(stack: Stack, tmp_path: Path):
    (program,) = (block.text for block in blocks() if (block.page, block.kind) == ("checkpoints.md", "python"))
    command = [sys.executable, "-c", as_here(program, stack)]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    steps = run(command, stack, whole).splitlines()
    last = (whole / "checkpoint").read_text()
    assert [line.split()[0] for line in steps] == list("123456") and last.endswith("/weights/step-6")
    # As if the program had been killed in its third step.
    (resumed / "checkpoint").write_text(last.replace("step-6", "step-2"))
    assert run(command, stack, resumed).splitlines() == steps[2:]

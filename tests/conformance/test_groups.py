"""Ranks on GPUs are processes of their own."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from tests.conformance.groups import run_group


def end_by_parent() -> None:
    """Exit code 0: the process that made the group started this one itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    raise SystemExit(int(parent.pid != os.getppid()))


def test_a_rank_on_a_gpu_is_no_fork_of_a_process_that_has_imported_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_group(end_by_parent) == [0, 0]

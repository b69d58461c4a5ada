"""Ranks are forked with their slow imports done; ranks on GPUs are processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest
import torch

from tests.conformance.groups import run_group
from tests.faults import worker_process


def end_by_parent() -> None:
    """Exit code 0: the process that made the group started this one itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    raise SystemExit(int(parent.pid != os.getppid()))


def end_by_imports() -> None:
    """Exit code 0: DeepSpeed was there before this rank."""
    raise SystemExit(int("deepspeed" not in sys.modules))


def test_a_rank_is_a_fork_of_a_process_with_deepspeed_where_tests_of_faults_came_first() -> None:
    first = worker_process._context.Process(target=os.getpid)
    first.start()
    first.join()
    assert run_group(end_by_imports) == [int(torch.cuda.is_available())] * 2


def test_a_rank_on_a_gpu_is_no_fork_of_a_process_that_has_imported_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_group(end_by_parent) == [0, 0]

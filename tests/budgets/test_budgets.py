"""A GPU gets few large kernels, and the host seldom waits for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def counts() -> Counts:
    done = subprocess.run([sys.executable, "-m", "tests.budgets"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Counts = json.loads(done.stdout.splitlines()[-1])
    return found


def test_more_tokens_need_no_more_kernels(counts: Counts) -> None:
    few, many = counts["1 tenant"], counts["1 tenant, 8 times the tokens"]
    assert {**many, "waits": 0} == {**few, "waits": 0}


def test_the_host_waits_once_a_micro_batch_and_twice_an_op(counts: Counts) -> None:
    """For the rows without a gradient, and for an Op's results and its gradient's norm."""
    assert counts["1 tenant"]["waits"] == 3
    for case in ("16 tenants", "16 uneven tenants"):
        assert counts[case]["waits"] == 1 + 2 * 16

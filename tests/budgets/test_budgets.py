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
    """For the rows without a gradient, and for an Op's results and its gradient's norm; never for a copy to the
    device."""
    assert counts["1 tenant"]["waits"] == 3
    for case in ("16 tenants", "16 uneven tenants"):
        assert counts[case]["waits"] == 1 + 2 * 16


def test_a_layer_with_one_tenant_has_few_kernels(counts: Counts) -> None:
    """About 30 of them are attention and its gradients, two kernels on CUDA."""
    assert counts["1 tenant"]["layer"] <= 260


def test_a_layer_with_16_tenants_has_few_more(counts: Counts) -> None:
    """However many tokens each tenant has. Uneven ones had 2,222 kernels in runs, and one tenant 752 for the same
    datums."""
    one, uneven = counts["1 tenant"]["layer"], counts["1 tenant, uneven datums"]["layer"]
    more = counts["16 tenants"]["layer"] - one
    assert more <= 0.2 * one
    assert counts["16 uneven tenants"]["layer"] == uneven + more

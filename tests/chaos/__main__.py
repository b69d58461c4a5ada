"""`python -m tests.chaos [--seed N] [--short]`: runs the long chaos run and prints its figures as JSON.

The exit code is 1 when anything is lost, doubled or different, or when fewer faults are injected than the form says.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from ops.bench import machine
from tests.chaos import forms, stack
from tests.chaos.forms import Form
from tests.chaos.run import Report, Run
from tests.contract.stack import Stack, running
from tests.models import tiny_qwen3

_RESULTS = Path(__file__).parent / "results"
_SCRATCH = Path("data/chaos")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    seed: int = arguments.seed
    command = shlex.join(
        ("python", "-m", "tests.chaos", "--seed", str(seed), *(["--short"] if arguments.short else []))
    )
    _quieten()
    folder = (_SCRATCH / f"seed-{seed}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    base = tiny_qwen3(folder / "base")
    surroundings = machine.surroundings(command)
    print(f"seed {seed}; logs in {folder}", file=sys.stderr, flush=True)
    parts = {
        "trainers": (stack.light(folder / "trainers", base), forms.SHORT if arguments.short else forms.LONG),
        "merging": (stack.merging(folder / "merging", base), forms.MERGED),
        "ranks": (stack.ranked(folder / "ranks", base), forms.RANKS),
    }
    reports = {name: run(made, seed, form) for name, (made, form) in parts.items()}
    faults = [f"{name}: {fault}" for name, (_, form) in parts.items() for fault in judge(reports[name], form)]
    content = {"ok": not faults, "faults": faults, **{name: asdict(report) for name, report in reports.items()}}
    text = json.dumps({**content, **surroundings}, indent=2) + "\n"
    (folder / "report.json").write_text(text)
    print(text)
    if faults:
        print(f"seed {seed} failed: `make chaos SEED={seed}` repeats it; logs in {folder}", file=sys.stderr)
        return 1
    if not arguments.short:
        _RESULTS.mkdir(exist_ok=True)
        (_RESULTS / "chaos.json").write_text(text)
    shutil.rmtree(folder)
    return 0


def run(made: Stack, seed: int, form: Form) -> Report:
    """Runs the chaos run from the stack's start to its end."""
    made.data_dir.parent.mkdir(parents=True, exist_ok=True)
    with running(made):
        chaos = Run(made, seed, form)
        return chaos.disturbed(chaos.reference())


def judge(report: Report, form: Form) -> list[str]:
    """Lists the faults of a run. A run without enough injected faults fails too, because it proves nothing."""
    return [*report.faults, *_missing(report, form)]


def _missing(report: Report, form: Form) -> Iterator[str]:
    for name, count in form.dose.items():
        if report.dealt.get(name, 0) < count:
            yield f"only {report.dealt.get(name, 0)} of {count} times: {name}"
    for what, found, least in (
        ("changes of owner", report.ownership_changes, form.changes),
        ("refused commits", report.refused_commits, form.refused),
        ("Ops in shared passes", report.shared_ops, form.shared),
        ("admissions", report.admissions_posted, form.calls * form.copies),
        ("plays", report.plays, form.slots),
    ):
        if found < least:
            yield f"only {found} of {least} {what}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill everything, and compare.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="repeats a run's plan")
    parser.add_argument("--short", action="store_true", help="the dose that the tests deal out")
    return parser.parse_args(argv)


def _quieten() -> None:
    os.environ["TINKER_TELEMETRY"] = "0"  # the SDK reports its own outage for half a minute
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", message="DEPRECATED", category=FutureWarning)
    logging.getLogger("tinker").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _stop)


def _stop(*_: object) -> NoReturn:
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())

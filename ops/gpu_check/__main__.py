"""`python -m ops.gpu_check [--minutes 9] [--suites NAME...] [--sizes SIZE...] [--out FOLDER]`.

Runs the short suites of tests, trains each size of model, serves the smallest one, and runs the other suites, until the
time is over, that of this program's imports included. Writes FOLDER/gpu.json after each part, so that a run that is cut
off leaves what it has, and prints a table. The exit code is 1 when a test fails or a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ops.bench import machine, report
from ops.bench.report import Goal, Outcome
from ops.gpu_check import processes, shapes, suites, training

_OUT = Path(__file__).parents[1] / "bench" / "results"
# The largest model's files, 16.4 GB, are there if they fit.
_IN_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 20 * 2**30
_FIRST = ("gpu", "parity", "optimizer")
_MFU, _OVER_PEFT, _SHARED = 0.45, 1.5, 0.9
_GOAL_SIZE, _GOAL_BATCH = "8B", "8k"
Figures = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    ends = psutil.Process().create_time() + 60 * arguments.minutes
    command = shlex.join(("python", "-m", "ops.gpu_check", *(sys.argv[1:] if argv is None else argv)))
    surroundings = machine.surroundings(command)
    [device] = _lines("device", seconds=60 * arguments.minutes)
    figures: Figures = {"device": device}
    outcome = Outcome(figures, ())
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _has_room() else None, ignore_cleanup_errors=True) as made:
        for name, part in _parts(arguments, Path(made)):
            left = ends - time.time()
            found = part(left) if left > 0 else {"left out": "no time was left"}
            figures[name] = figures.get(name, {}) | found
            print(f"{name}: {json.dumps(figures[name])}", file=sys.stderr, flush=True)
            outcome = Outcome(figures, tuple(goals(figures)))
            report.write(arguments.out, "gpu", outcome, surroundings)
    print(f"on {device.get('name')}, {machine.kind()}")
    if "mfu" in device:
        print(f"MFU: {device['mfu']}")
    print(report.table({"gpu": outcome}))
    return 0 if outcome.met else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ops.gpu_check", description="Check training on this machine's GPU."
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="the check ends after this time, with what it has")
    names = [*suites.SUITES, *suites.SERVED]
    parser.add_argument("--suites", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument("--sizes", nargs="*", default=["8B", "0.6B", "4B"], choices=list(shapes.SHAPES), metavar="SIZE")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="FOLDER", help="folder for gpu.json")
    return parser.parse_args(argv)


def _parts(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[float], Figures]]]:
    """The short suites, the sizes, the stacks, and the suites that may take all of the time left."""
    parts = {
        name: partial(suites.run, suites.SUITES[name], folder) for name in arguments.suites if name in suites.SUITES
    }
    yield from ((name, part) for name, part in parts.items() if name in _FIRST)
    for size in arguments.sizes:
        yield size, partial(_trained, size, folder / size, training.TINSMITH, 0.5)
        yield size, partial(_trained, size, folder / size, training.PEFT, 1.0)
    smallest = min(arguments.sizes, key=list(shapes.SHAPES).index, default="0.6B")
    served = [name for name in suites.SERVED if name in arguments.suites]
    yield from ((name, partial(_served, name, smallest, folder / name)) for name in served)
    yield from ((name, part) for name, part in parts.items() if name not in _FIRST)


def _has_room() -> bool:
    return _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM_BYTES


def _trained(size: str, folder: Path, side: str, share: float, seconds: float) -> Figures:
    """Figures of each batch on one side. Each side has a process, and with it the whole device; the first one has half
    of the time, so that there is something to compare with."""
    rows = _lines("training", size, str(folder), side, seconds=share * seconds)
    if side == training.PEFT:
        shutil.rmtree(folder, ignore_errors=True)
    return {side: {row.pop("batch"): row for row in rows}}


def _served(name: str, size: str, folder: Path, seconds: float) -> Figures:
    """Figures and goals of a bench of a whole stack."""
    return suites.missing(suites.SERVED[name]) or dict(
        *_lines("serving", name, size, str(folder), seconds=seconds)[-1:]
    )


def _lines(module: str, *arguments: str, seconds: float) -> list[dict[str, Any]]:
    """The lines of JSON that a module of this package prints within `seconds`; a last one says how it failed."""
    command = [sys.executable, "-m", f"ops.gpu_check.{module}", *arguments]
    with tempfile.TemporaryFile() as output:
        code = processes.run(command, seconds, output)
        output.seek(0)
        printed = [json.loads(line) for line in output if line.endswith(b"}\n")]
    ended = f"exit code {code}" if code is not None else f"unfinished after {seconds:.0f} s"
    return printed if code == 0 else [*printed, {"batch": "the rest", "failed": ended}]


def goals(figures: Figures) -> Iterator[Goal]:
    """Goals of what ran; those of training need a step of both batches."""
    for name in suites.SUITES:
        if "ok" in figures.get(name, ()):
            yield Goal(f"tests of {name} that passed", float(figures[name]["ok"]), "at_least", 1, "")
    for name in suites.SERVED:
        yield from (Goal(**goal) for goal in figures.get(name, {}).get("goals", ()))
    for size in shapes.SHAPES:
        sides = figures.get(size, {})
        own, bare = (_best_s(sides.get(side, {})) for side in (training.TINSMITH, training.PEFT))
        for batch in own.keys() & bare.keys():
            over = bare[batch] / own[batch]
            yield Goal(f"{size}, {batch}: over transformers + PEFT", over, "at_least", _OVER_PEFT, "")
        if training.UNEVEN in own and training.SHARED in own:
            over = own[training.UNEVEN] / own[training.SHARED]
            yield Goal(f"{size}: 16 uneven tenants over one", over, "at_least", _SHARED, "")
    yield from _mfu(figures)


def _mfu(figures: Figures) -> Iterator[Goal]:
    peak = figures["device"].get("datasheet_flops")
    own = _best_s(figures.get(_GOAL_SIZE, {}).get(training.TINSMITH, {}))
    if peak and _GOAL_BATCH in own:
        flops = shapes.step_flops(shapes.config(_GOAL_SIZE), training.lengths(_GOAL_SIZE)[_GOAL_BATCH])
        yield Goal(f"{_GOAL_SIZE}, {_GOAL_BATCH}: MFU", flops / own[_GOAL_BATCH] / peak, "at_least", _MFU, "")


def _best_s(rows: Figures) -> dict[str, float]:
    """Seconds of the best step of each batch that has one."""
    return {batch: min(row["step_s"]) for batch, row in rows.items() if "step_s" in row}


if __name__ == "__main__":
    sys.exit(main())

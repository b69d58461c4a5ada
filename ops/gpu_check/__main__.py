"""`python -m ops.gpu_check [--minutes 9] [--suites NAME...] [--sizes SIZE...] [--out FOLDER]`.

Runs the tests of kernels, trains the first size of model, runs the tests of vLLM, serves the smallest size, runs the
other short suites, trains the other sizes, and runs the suites that may take long, until the time is over, that of this
program's imports included. Writes FOLDER/gpu.json after each part, so that a run that is cut off leaves what it has,
and prints a table. The logs of a suite or a stack that failed or did not end are copied to FOLDER/logs. The exit code
is 1 when a test fails, a process crashes or a goal is missed, and not because the end of the time cuts a part off. It
is 2 on a machine without a GPU, unless the sizes are at most `tiny`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from app.errors import SetupError
from ops.bench import machine, report
from ops.bench.report import Goal, Outcome
from ops.gpu_check import processes, shapes, suites, training
from workers.backends.devices import check_gpus

# git ignores it. ops/bench/results has the report of an H200, which other code reads.
_OUT = Path("data/gpu-check")
# The largest model's files, 16.4 GB, are there if they fit.
_IN_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 20 * 2**30
# The stacks' data is not: in memory, the journal's fsync and the copy of an adapter cost nothing.
_SCRATCH = Path("data/bench")
_LOGS = ("*.log", "data/logs/*.log")  # in the folder of a part: of the suite, or of the bench and its stack
# 8B on both sides takes some three minutes of the nine on an H200, and each engine of vLLM up to 90 s to start.
_FIRST = ("gpu",)
_SECOND = ("vllm", "sleep", *suites.SERVED, "parity", "optimizer")
_SERVED_SIZE = "0.6B"  # if no size is trained
_REST = "the rest"
# Of a GPU's memory, or of a stack's share of it: the rest is for CUDA itself, the adapter and activations.
_MOST_WEIGHTS = 0.9
_MFU, _OVER_PEFT, _SHARED = 0.45, 1.5, 0.9
_GOAL_SIZE, _GOAL_BATCH = "8B", "8k"
Figures = dict[str, Any]
Part = Callable[[float], Figures]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if refusal := _refusal(arguments):
        print(f"ops.gpu_check: {refusal}", file=sys.stderr)
        return 2
    ends = psutil.Process().create_time() + 60 * arguments.minutes
    command = shlex.join(("python", "-m", "ops.gpu_check", *(sys.argv[1:] if argv is None else argv)))
    surroundings = machine.surroundings(command)
    [device] = _lines("device", seconds=60 * arguments.minutes)
    figures: Figures = {"device": device}
    outcome = Outcome(figures, ())
    with _folders() as (models, work):
        for name, part in _parts(arguments, models, work):
            left = ends - time.time()
            unfit = _unfit(name, arguments.sizes, device)
            found = unfit or (part(left) if left > 0 else {"left out": "no time was left"})
            figures[name] = figures.get(name, {}) | found
            if _needs_logs(found):
                _keep_logs(work / name, arguments.out / "logs" / name)
            print(f"{name}: {json.dumps(figures[name])}", file=sys.stderr, flush=True)
            outcome = Outcome(figures, tuple(goals(figures)))
            report.write(arguments.out, "gpu", outcome, surroundings)
    print(f"on {device.get('name')}, {machine.kind()}")
    if "mfu" in device:
        print(f"MFU: {device['mfu']}")
    print(report.table({"gpu": outcome}))
    return int(not all(goal.met for goal in outcome.goals))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ops.gpu_check", description="Check training on this machine's GPU."
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="the check ends after this time, with what it has")
    names = [*suites.SUITES, *suites.SERVED]
    parser.add_argument("--suites", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument("--sizes", nargs="*", default=["8B", "0.6B", "4B"], choices=list(shapes.SHAPES), metavar="SIZE")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="FOLDER", help="folder for gpu.json (data/gpu-check)")
    return parser.parse_args(argv)


def _refusal(arguments: argparse.Namespace) -> str:
    """The reason not to begin where torch can use no GPU: a CPU is too small for models of a real size. Empty if the
    check can begin."""
    sizes = arguments.sizes or (_SERVED_SIZE for name in arguments.suites if name in suites.SERVED)
    if torch.cuda.is_available() or {*sizes} <= {"tiny"}:
        return ""
    try:
        check_gpus()
    except SetupError as error:
        return str(error)
    return "no GPU that torch can use; `--sizes tiny` tries the check on a CPU"


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """Temporary folders: one of models, in memory if it has room, and one of all else, on the disk."""
    _SCRATCH.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=_IN_MEMORY if _has_room() else None, ignore_cleanup_errors=True) as models,
        tempfile.TemporaryDirectory(prefix="gpu-", dir=_SCRATCH, ignore_cleanup_errors=True) as work,
    ):
        yield Path(models), Path(work).absolute()


def _has_room() -> bool:
    return _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM_BYTES


def _parts(arguments: argparse.Namespace, models: Path, work: Path) -> Iterator[tuple[str, Part]]:
    """The parts in the order that they run in. Those that may take all of the time left come last."""
    parts: dict[str, Part] = {
        name: partial(suites.run, suites.SUITES[name], work / name)
        for name in arguments.suites
        if name in suites.SUITES
    }
    for name in suites.SERVED:
        if name in arguments.suites:
            parts[name] = partial(_served, name, _smallest(arguments.sizes), models / name, work / name)
    yield from _taken(parts, _FIRST)
    yield from _sides(arguments.sizes[:1], models)
    yield from _taken(parts, _SECOND)
    yield from _sides(arguments.sizes[1:], models)
    yield from parts.items()


def _smallest(sizes: Iterable[str]) -> str:
    """The size that the stacks serve."""
    return min(sizes, key=list(shapes.SHAPES).index, default=_SERVED_SIZE)


def _unfit(name: str, sizes: Iterable[str], device: Figures) -> Figures:
    """The report of a part that is left out because the device is too old or too small for it; empty if it can run."""
    suite = suites.SUITES.get(name)
    needs = suite.needs if suite else suites.SERVED.get(name, ())
    if "vllm" in needs and not device.get("bfloat16", True):
        return {"left out": "vLLM needs GPUs that compute in bfloat16 (compute capability 8.0)"}
    if suite or "memory_gib" not in device:
        return {}
    size, share = (_smallest(sizes), suites.SHARE) if name in suites.SERVED else (name, 1.0)
    weights, room = shapes.weight_bytes(size) / 2**30, _MOST_WEIGHTS * share * device["memory_gib"]
    if weights <= room:
        return {}
    return {"left out": f"{size} has {weights:.1f} GiB of weights, and this GPU has {room:.1f} GiB for them"}


def _taken(parts: dict[str, Part], names: Iterable[str]) -> list[tuple[str, Part]]:
    """Takes those of `names` out of `parts`."""
    return [(name, parts.pop(name)) for name in names if name in parts]


def _sides(sizes: Iterable[str], models: Path) -> Iterator[tuple[str, Part]]:
    for size in sizes:
        yield size, partial(_trained, size, models / size, training.TINSMITH, 0.5)
        yield size, partial(_trained, size, models / size, training.PEFT, 1.0)


def _trained(size: str, folder: Path, side: str, share: float, seconds: float) -> Figures:
    """Figures of each batch on one side. Each side has a process, and with it the whole device; the first one has half
    of the time, so that there is something to compare with."""
    rows = _lines("training", size, str(folder), side, seconds=share * seconds)
    if side == training.PEFT:
        shutil.rmtree(folder, ignore_errors=True)
    return {side: {row.pop("batch"): row for row in rows}}


def _served(name: str, size: str, model: Path, folder: Path, seconds: float) -> Figures:
    """Figures and goals of a bench of a whole stack, which has its data in `folder`."""
    if lacking := suites.missing(suites.SERVED[name]):
        return lacking
    lines = _lines("serving", name, size, str(model), str(folder), seconds=seconds)
    shutil.rmtree(model, ignore_errors=True)
    return {key: value for line in lines for key, value in line.items() if key != "batch"}


def _needs_logs(found: Figures) -> bool:
    """Whether a suite or a stack failed or did not end."""
    return bool(found.get("failed")) or "ended" in found or not found.get("ok", True)


def _keep_logs(folder: Path, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for log in (log for pattern in _LOGS for log in folder.glob(pattern)):
        shutil.copyfile(log, kept / log.name)


def _lines(module: str, *arguments: str, seconds: float) -> list[dict[str, Any]]:
    """The lines of JSON that a module of this package prints within `seconds`; a last one says how it failed, or that
    it did not end."""
    command = [sys.executable, "-m", f"ops.gpu_check.{module}", *arguments]
    with tempfile.TemporaryFile() as output:
        code = processes.run(command, seconds, output)
        output.seek(0)
        printed = [json.loads(line) for line in output if line.endswith(b"}\n")]
    if code is None:
        return [*printed, {"batch": _REST, "ended": suites.cut_off(seconds)}]
    return printed if code == 0 else [*printed, {"batch": _REST, "failed": f"exit code {code}"}]


def goals(figures: Figures) -> Iterator[Goal]:
    """Goals of what ran; those of training need a step of both batches. What was cut off has none."""
    yield from (Goal(f"{name} ran to its end", 0.0, "at_least", 1, "") for name in _crashed(figures))
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


def _crashed(figures: Figures) -> Iterator[str]:
    """The stacks and the sides of training whose process failed."""
    yield from (name for name in ("device", *suites.SERVED) if "failed" in figures.get(name, ()))
    for size in shapes.SHAPES:
        for side in (training.TINSMITH, training.PEFT):
            if "failed" in figures.get(size, {}).get(side, {}).get(_REST, ()):
                yield f"{size}, {side}"


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `processes.run` ends its child
    sys.exit(main())

"""One side of a comparison in its own process. It computes only on request.

It reads one count per line from stdin and answers with one line of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.stack.child import end_with
from workers.process.startup import uncollected

CORES = len(os.sched_getaffinity(0))
_STOP_S = 30.0


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Every process started in the block, on either side, computes with `count` threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


class Side:
    """One side: `measure(n)` runs it n times and returns its report."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def measure(self, count: int) -> Any:
        """Raises RuntimeError with the end of the side's log when its process has died."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bare side ended early:\n{self._log.read_text()[-2000:]}")
        return json.loads(line)


@contextmanager
def running(module: str, argument: str, log: Path, *further: str) -> Iterator[Side]:
    """Starts `python -m module argument *further` and yields when it is ready. It ends with the block, or with this
    process."""
    parent = os.getpid()
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module, argument, *further],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=lambda: end_with(parent),
        )
    side = Side(process, log)
    try:
        side.answer()
        yield side
    finally:
        process.kill()
        process.communicate(timeout=_STOP_S)


def measured(module: str, argument: str, log: Path, rounds: int) -> Any:
    """Report of `rounds` rounds of a side that has every core to itself, after one warm-up round."""
    with threads(CORES), running(module, argument, log) as alone:
        alone.measure(1)
        return alone.measure(rounds)


def serve(prepare: Callable[[], Callable[[int], Any]]) -> None:
    """Serves in the side's `__main__`: prepares, reports that it is ready, measures on demand until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    with uncollected():  # as a worker does: a collection over all that was prepared takes up to half a second
        measure = prepare()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(int(line))), file=answers, flush=True)


def serve_ranks(
    count: int, module: str, prepare: Callable[[], Callable[[int], Any]], follow: Callable[[], None]
) -> None:
    """Serves a side of `count` processes under torchrun: rank 0 serves, the others `follow` it.

    The launcher is killed at the end: rank 0 then finds its stdin closed, and the others find rank 0 gone.
    """
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        os.execv(sys.executable, [sys.executable, *launcher, "-m", module, *sys.argv[1:]])
    if os.environ["RANK"] == "0":
        serve(prepare)
    else:
        follow()

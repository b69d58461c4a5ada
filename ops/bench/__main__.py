"""`python -m ops.bench [NAME...] [--out FOLDER]`: runs benchmarks, writes their JSON and prints a table.

The exit code is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from app.stack import ports
from ops.bench import (
    adapters,
    api_body,
    api_start,
    ddp,
    fairness,
    families,
    first_token,
    handover,
    machine,
    memory,
    merged,
    overhead,
    pairs,
    ragged,
    reads,
    real_step,
    recovery,
    report,
    rl_loop,
    sampling,
    saves,
    scale,
    shared_cores,
    snapshots,
    tenants,
)
from ops.bench.report import Outcome

BENCHES: Mapping[str, Callable[[Path], Outcome]] = {
    "api_start": api_start.run,
    "api_body": api_body.run,
    "overhead": overhead.run,
    "pairs": pairs.run,
    "real_step": real_step.run,
    "merged": merged.run,
    "tenants": tenants.run,
    "ragged": ragged.run,
    "families": families.run,
    "ddp": ddp.run,
    "memory": memory.run,
    "recovery": recovery.run,
    "snapshots": snapshots.run,
    "saves": saves.run,
    "sampling": sampling.run,
    "adapters": adapters.run,
    "first_token": first_token.run,
    "rl_loop": rl_loop.run,
    "shared_cores": shared_cores.run,
    "handover": handover.run,
    "fairness": fairness.run,
    "scale": scale.run,
    "reads": reads.run,
}
_OUT = Path(__file__).parent / "results"
# Not the system's temporary folder: it may lie in memory, where the journal's fsync costs nothing.
_SCRATCH = Path("data/bench")


def main(argv: Sequence[str] | None = None, benches: Mapping[str, Callable[[Path], Outcome]] = BENCHES) -> int:
    arguments = _parse(argv, benches)
    signal.signal(signal.SIGTERM, _stop)
    os.environ.update(ports.without_proxy(os.environ))
    outcomes: dict[str, Outcome] = {}
    for name in arguments.names or benches:
        print(f"{name} ...", file=sys.stderr, flush=True)
        surroundings = machine.surroundings(shlex.join(("python", "-m", "ops.bench", name)))
        with _scratch() as folder:
            outcomes[name] = benches[name](folder)
        report.write(arguments.out, name, outcomes[name], surroundings)
    print(f"on {machine.kind()}")
    print(report.table(outcomes))
    return 0 if all(outcome.met for outcome in outcomes.values()) else 1


def _parse(argv: Sequence[str] | None, benches: Mapping[str, object]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description="Measure the service against its goals.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which benches to run: {', '.join(benches)}")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="FOLDER", help="folder for the JSON files")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in benches]
    if unknown:
        parser.error(f"unknown bench {unknown[0]!r}; the benches are {', '.join(benches)}")
    return arguments


def _stop(*_: object) -> NoReturn:
    print("stopped by SIGTERM", file=sys.stderr, flush=True)
    sys.exit(143)


@contextmanager
def _scratch() -> Iterator[Path]:
    _SCRATCH.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=_SCRATCH)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

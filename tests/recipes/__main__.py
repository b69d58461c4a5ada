"""`python -m tests.recipes`: the cookbook's defaults on tiny models, then its recipes on the bundled SmolLM2-135M.

The exit code is 1 when a recipe fails, or a program with an unpublished loss is not refused.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from app.demo import model
from app.demo.run import running_stack
from tests.contract.stack import API_KEY, running
from tests.recipes import defaults, programs
from tests.recipes.data import lay_out
from tests.recipes.models import serving
from tests.recipes.run import run

_SCRATCH = Path("data/recipes")


def main() -> int:
    folder = _SCRATCH.absolute()
    for part in ("work", "defaults", "tiny"):
        shutil.rmtree(folder / part, ignore_errors=True)
    return int(any([_defaults(folder), _recipes(folder)]))


def _defaults(folder: Path) -> int:
    work = lay_out(folder / "defaults")
    with running(serving(folder / "tiny")) as stack:
        print(f"logs in {work}", flush=True)
        code = run("defaults", stack.url, API_KEY, ["long"], work)
    ends = defaults.ended(work)
    for name, end in ends.items():
        if end.error or name not in defaults.METRICS:
            print(f"{name}: {end.error or 'no error'}")
        else:
            _report(name, defaults.METRICS[name], defaults.logged(work, name, defaults.METRICS[name]))
    failed = {name for name, end in ends.items() if end.error}
    return code or int(failed != defaults.REFUSED)


def _recipes(folder: Path) -> int:
    with running_stack(folder / "server") as stack:
        print(f"logs in {folder / 'work'}", flush=True)
        code = run("programs", stack.url, stack.api_key, [model.NAME, "long"], lay_out(folder / "work"))
    for name, metric in programs.METRICS.items():
        _report(name, metric, programs.metrics(folder / "work" / name, metric))
    return code


def _report(name: str, metric: str, values: list[float]) -> None:
    print(f"{name:15} {metric}: {' '.join(f'{value:.3f}' for value in values)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

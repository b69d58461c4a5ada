"""`python -m tests.recipes`: the cookbook's recipes on the bundled SmolLM2-135M. The exit code is 1 when one fails."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from app.demo import model
from app.demo.run import running_parts
from tests.recipes.data import lay_out
from tests.recipes.programs import METRICS, metrics
from tests.recipes.run import run

_SCRATCH = Path("data/recipes")


def main() -> int:
    folder = _SCRATCH.absolute()
    shutil.rmtree(folder / "work", ignore_errors=True)
    with running_parts(folder / "server") as stack:
        print(f"logs in {folder / 'work'}", flush=True)
        code = run(stack.url, stack.api_key, model.NAME, "long", lay_out(folder / "work"))
    for name, metric in METRICS.items():
        values = metrics(folder / "work" / name, metric)
        print(f"{name:13} {metric}: {' '.join(f'{value:.3f}' for value in values)}")
    return code


if __name__ == "__main__":
    sys.exit(main())

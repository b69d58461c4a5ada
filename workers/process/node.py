"""`python -m workers.node`: runs one host's ranks of a rank group. Started over ssh by workers/process/multinode.py.

The first line on stdin says what to run. It also carries settings and secrets, so that they are on no command line and
in no environment another process can read. The lines after it are heartbeats. When stdin ends, or falls silent, the
ranks here end too: rank 0 ends in order and releases the others, and the remaining ranks are killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from app.settings import SETTINGS_VARIABLE
from app.stack import strays
from app.stack.child import end_with
from app.stack.supervisor import SETUP_ERROR_CODE

_TICK_S = 0.2
# ssh reports a lost connection after 30 s; this limit is for a host that says nothing.
SILENCE_S = 60.0


class Lifeline:
    """A pipe whose other end sends heartbeats."""

    def __init__(self, pipe: FileIO) -> None:
        self._pipe = pipe
        self._heard = time.monotonic()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def held(self) -> bool:
        return not self._ended and time.monotonic() - self._heard < SILENCE_S

    def _listen(self) -> None:
        for _ in self._pipe:
            self._heard = time.monotonic()
        self._ended = True


def main() -> int:
    # No buffer: the lifeline's thread would still hold its lock when this process exits.
    pipe = FileIO(sys.stdin.fileno(), closefd=False)
    order = json.loads(pipe.readline())
    if not _shares_data(order["witness"]):
        folder = Path(order["witness"]["path"]).parents[1]
        print(
            f"{order['name']}: {os.uname().nodename} does not see the data folder {folder} of the first host: mount "
            "it there under the same path, because every rank reads checkpoints from it",
            file=sys.stderr,
        )
        return SETUP_ERROR_CODE
    strays.adopt()
    with tempfile.NamedTemporaryFile("w", prefix="tinsmith-", suffix=".toml") as settings:
        settings.write(order["settings"])
        settings.flush()
        try:
            return _launch(order["launch"], {**order["environ"], SETTINGS_VARIABLE: settings.name}, pipe)
        finally:
            strays.kill(())


def _launch(arguments: list[str], environ: Mapping[str, str], pipe: FileIO) -> int:
    """Runs DeepSpeed's launcher for one node: it ends all of its ranks when one of them fails, or it gets a SIGTERM."""
    me = os.getpid()
    launcher = subprocess.Popen(
        [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: end_with(me),
    )
    lifeline = Lifeline(pipe)
    while launcher.poll() is None and lifeline.held():
        time.sleep(_TICK_S)
    launcher.terminate()
    return launcher.wait()


def _shares_data(witness: Mapping[str, Any]) -> bool:
    try:
        return bool(Path(witness["path"]).read_text() == witness["token"])
    except OSError:
        return False

"""Processes with a deadline, of which nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO


def run(command: Sequence[str], seconds: float, output: IO[bytes], messages: IO[bytes] | None = None) -> int | None:
    """Runs a command with `output` for its standard output and, unless that is None, `messages` for its errors.

    Returns its exit code; None if it was killed after `seconds`. None of its children is left in any case, as ranks and
    servers hold the GPU's memory too.
    """
    process = subprocess.Popen(command, stdout=output, stderr=messages, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""A supervised process and all processes that it starts."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.stack import strays

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a process. `environ` overrides the supervisor's own environment."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A process that leads its own session. So a terminal's Ctrl-C reaches only the supervisor, and a signal to its
    group reaches the processes it started. The kernel sends it a SIGTERM if the supervisor is killed.

    Start children only from the main thread: the kernel sends this signal when the thread that forked ends.
    """

    def __init__(self, command: Command, log: Path, inherited_fds: tuple[int, ...] = ()) -> None:
        self.command = command
        self.log = log
        self._inherited_fds = inherited_fds
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._group_ended = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        parent = os.getpid()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.environ},
                start_new_session=True,
                preexec_fn=lambda: end_with(parent),
                pass_fds=self._inherited_fds,
            )
        self._group_ended = False

    def exit_code(self) -> int | None:
        """The exit code: None while the process runs; a negative number is the signal that ended it."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        if self._process:
            self._process.terminate()

    def kill_group(self) -> None:
        """Kills the process and its group, also members that outlived the process. Only resource trackers live until
        `strays.kill`.

        It kills once for each start, because later the group's number may belong to another process.
        """
        if self._process and not self._group_ended:
            strays.kill_group(self._process.pid)
            self._process.wait()
            self._group_ended = True

    def tail(self, lines: int) -> list[str]:
        """The last lines of its log since the last start, without blank lines."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]


def end_with(parent: int) -> None:
    """Asks the kernel for a SIGTERM when process `parent` dies. A forked child calls it before it runs its program."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the call above.
    if os.getppid() != parent:
        os._exit(1)

"""A supervised process and all processes that it starts, also grandchildren that left its process group (an engine with
its own session) and outlived it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.settings import without_secret_variables

_CODE = str(Path(__file__).resolve().parents[2])
# The variables of torchrun, whose options have the prefix PET_, and of DeepSpeed's launcher.
_OF_A_RANK = re.compile(
    r"((LOCAL|GROUP|ROLE|CROSS)_)?(RANK|WORLD_SIZE)|(LOCAL|CROSS)_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PET)_\w+"
)
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_TRACKER = b"resource_tracker import main"
_TRACKERS_S = 5.0
_TICK_S = 0.02
_LOG_BYTES = 16 * 2**20


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` for a child that runs our code. Secrets are left out: they would override the settings
    that options have changed. So are the variables that describe a rank: a trainer would take itself for that rank of
    the job, a PyTorchJob or Slurm's, in which `tinsmith up` runs."""
    kept = without_secret_variables(environ).items()
    made = {name: value for name, value in kept if not _OF_A_RANK.fullmatch(name)}
    return {**made, **import_path(made)}


def import_path(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep a Python and its children from importing from the current folder, where a file of the
    user's may have the name of a module: `python -m` would put it first on the import path. A checkout that this
    process itself runs from its current folder stays on the path."""
    made = {"PYTHONSAFEPATH": "1"}
    if sys.path[0] == _CODE and not sys.flags.safe_path:
        made["PYTHONPATH"] = os.pathsep.join(filter(None, (_CODE, environ.get("PYTHONPATH"))))
    return made


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a process. `environ` overrides the supervisor's own `environment`."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def serves_base_model(self) -> bool:
        """True for a worker; the API and the embedded servers serve none."""
        return "--base" in self.argv


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
                env={**environment(os.environ), **self.command.environ},
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
        `kill_strays`.

        It kills once for each start, because later the group's number may belong to another process.
        """
        if self._process and not self._group_ended:
            kill_group(self._process.pid)
            self._process.wait()
            self._group_ended = True

    def rotate_log(self) -> None:
        """Moves the content of a large log to `<log>.1`, in the place of the former content there.

        The process goes on writing to the same file, which it opened to append. A line that it writes between the copy
        and the cut is lost, and so is all content where the disk has no room for the copy. Does nothing where the log
        was removed.
        """
        with suppress(FileNotFoundError):
            if self.log.stat().st_size <= _LOG_BYTES:
                return
            with suppress(OSError):
                shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}.1"))
            os.truncate(self.log, 0)
            self._log_start = 0

    def tail(self, lines: int) -> list[str]:
        """The last lines of its log since the last start, without blank lines; none where the log cannot be read."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]


def end_with(parent: int) -> None:
    """Asks the kernel for a SIGTERM when process `parent` dies. A forked child calls it before it runs its program.

    Signals must end the child also before then, where it has the handlers of its parent: one may only set a flag, or
    raise KeyboardInterrupt, which subprocess would report as a fault.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):
        if callable(signal.getsignal(number)):  # one that is ignored stays so
            signal.signal(number, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the call above.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, and not of init, from now on."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The processes that are children of this one."""
    return {pid for pid, (parent, _) in _kin().items() if parent == os.getpid()}


def kill_strays(known: Collection[int]) -> None:
    """Kills and reaps each child of this process that is not `known`. Their children then become children of this
    process, so the work repeats.

    Python's resource trackers come last and get time to end by themselves: once the processes they served are gone,
    they remove the shared memory that those processes left.
    """

    def strays() -> set[int]:
        return children() - set(known)

    while others := {pid for pid in strays() if not _is_tracker(pid)}:
        _kill(others)
    deadline = time.monotonic() + _TRACKERS_S
    while (trackers := strays()) and time.monotonic() < deadline:
        _reap(trackers, os.WNOHANG)
        time.sleep(_TICK_S)
    _kill(trackers)


def kill_group(group: int) -> None:
    """Kills the processes of a group except resource trackers; `kill_strays` ends those."""
    killed: set[int] = set()
    while found := {pid for pid, (_, its) in _kin().items() if its == group and not _is_tracker(pid)} - killed:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    kin, found = _kin(), {pid}
    while more := {each for each, (parent, _) in kin.items() if parent in found} - found:
        found |= more
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _reap(pids, 0)


def _reap(pids: Iterable[int], options: int) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, options)


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _kin() -> dict[int, tuple[int, int]]:
    """The parent and the process group of every process."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # the process has just ended
                # The command's name before the last ')' may hold any bytes, also those of a character that was cut.
                _, parent, group, *_ = (process / "stat").read_bytes().rpartition(b")")[2].split()
                found[int(process.name)] = int(parent), int(group)
    return found

"""Keeps child processes running until a stop, and leaves none of them behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from app.errors import SetupError, TinsmithError
from app.stack import child as stack_child
from app.stack import memory
from app.stack.child import Child, Command
from app.stack.signals import StopFlag
from app.stack.terminal import warn

SETUP_ERROR_CODE = 2
# A worker ends with it when its base model cannot be served (UnservableModel).
UNSERVABLE_CODE = 3
_TICK_S = 0.1
_TAIL_LINES = 20
# A launcher of ranks writes further lines after the last line of a rank.
_SEARCHED_LINES = 200


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The limits of restarts. While the stack starts, a process that was never ready ends the stack when it has died
    `tries` times: it may load a model for minutes before each death. The pause before a restart doubles from
    `first_delay_s` to `longest_delay_s`. It begins anew after a life of `window_s` seconds, if the stack or the process
    was ready before."""

    tries: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0

    def delay_s(self, failures: int) -> float:
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 30))


class _Watched:
    """A child with its history: the time of its start and the machine's out-of-memory kills until then, whether it was
    ready, the number of deaths in a row, the time of its restart, and whether it ended for good."""

    def __init__(self, child: Child, oom_kills: Callable[[], int]) -> None:
        self.child = child
        self._oom_kills = oom_kills
        self._kills_before = 0
        self.started = 0.0
        self.was_ready = False
        self.failures = 0
        self.due: float | None = None
        self.ended = False

    def start(self) -> None:
        self._kills_before = self._oom_kills()
        self.started = time.monotonic()
        self.child.start()
        self.due = None

    def death(self, code: int) -> str:
        """Its name and its end in words, with the cause as far as that can be known."""
        name = self.child.command.name
        if code >= 0:
            return f"{name} ended with code {code}"
        number = -code
        known = number in {one.value for one in signal.Signals}
        text = f"{name} was ended by signal {number}{f' ({signal.Signals(number).name})' if known else ''}"
        is_short = number == signal.SIGKILL and self._oom_kills() > self._kills_before
        return f"{text}: the kernel was out of memory" if is_short else text


class Supervisor:
    """Starts children in tiers; `run_until` watches them; `stop` ends the tiers in reverse order.

    Use it as a context manager, in the main thread. `stopping` is set from a signal handler.
    """

    def __init__(
        self,
        logs: Path,
        stopping: StopFlag,
        *,
        policy: RestartPolicy | None = None,
        grace_s: float = 10.0,
        inherited_fds: tuple[int, ...] = (),
        report: Callable[[str], None] = warn,
        oom_kills: Callable[[], int] = memory.oom_kills,
    ) -> None:
        self._logs = logs
        self._stopping = stopping
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._fds = inherited_fds
        self._report = report
        self._oom_kills = oom_kills
        self._tiers: list[list[_Watched]] = []
        self._strangers: set[int] = set()

    def __enter__(self) -> Supervisor:
        # A shell that ended with `exec tinsmith up` leaves its background processes as children of this one. What they
        # start and leave behind cannot be told from what workers leave behind.
        self._strangers = stack_child.children()
        stack_child.adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, commands: Iterable[Command]) -> None:
        """Starts one tier. Its processes may rely on the earlier tiers."""
        tier: list[_Watched] = []
        self._tiers.append(tier)
        for command in commands:
            watched = _Watched(Child(command, self._logs / f"{command.name}.log", self._fds), self._oom_kills)
            tier.append(watched)
            watched.start()

    @property
    def ended(self) -> frozenset[str]:
        """The names of the children that are not started again."""
        return frozenset(watched.child.command.name for watched in self._all() if watched.ended)

    def note_ready(self, names: Collection[str]) -> None:
        """Notes that the children with these names are ready: from now on they end the stack no more, as in `run`."""
        for watched in self._all():
            watched.was_ready |= watched.child.command.name in names

    def run_until(self, condition: Callable[[], bool]) -> bool:
        """Watches and restarts children until the condition holds (True) or a stop is asked for (False).

        Raises SetupError with its last line when a child exits with 2, and TinsmithError with the end of its log when a
        child keeps dying. A worker that exits with 3 is not started again.
        """
        return self._run_until(condition, patient=False)

    def run(self) -> None:
        """Watches and restarts children until a stop is asked for; a child that keeps dying does not end the others.

        The supervisor restarts such a child without limit. The cause may be one client's Op, which fails after three
        tries, or it may pass. Exit code 2 is treated the same way, because the child ran with this setup before: the
        memory of a GPU may not be free yet, or a file server may be out of reach.
        """
        self._run_until(lambda: False, patient=True)

    def _run_until(self, condition: Callable[[], bool], *, patient: bool) -> bool:
        while not self._stopping.is_set():
            for watched in self._all():
                self._look_after(watched, patient)
                watched.child.rotate_log()
            if condition():
                return True
            self._stopping.wait(_TICK_S)
        return False

    def stop(self) -> None:
        """Sends SIGTERM to each tier, and SIGKILL after the grace. Returns when every descendant is gone."""
        for tier in reversed(self._tiers):
            for watched in tier:
                watched.child.terminate()
            deadline = time.monotonic() + self._grace_s
            while any(w.child.exit_code() is None for w in tier) and time.monotonic() < deadline:
                time.sleep(_TICK_S)
            for watched in tier:
                watched.child.kill_group()
        stack_child.kill_strays(self._strangers)

    def _all(self) -> list[_Watched]:
        return [watched for tier in self._tiers for watched in tier]

    def _look_after(self, watched: _Watched, patient: bool) -> None:
        if watched.ended:
            return
        patient = patient or watched.was_ready
        if watched.due is not None:
            if time.monotonic() >= watched.due:
                self._start_again(watched, patient)
            return
        code = watched.child.exit_code()
        if code is not None:
            self._handle_exit(watched, code, patient)

    def _start_again(self, watched: _Watched, patient: bool) -> None:
        try:
            watched.start()
        except OSError as error:  # such as too many processes, or no memory
            self._plan_restart(watched, f"{watched.child.command.name} cannot be started: {error}", patient)

    def _handle_exit(self, watched: _Watched, code: int, patient: bool) -> None:
        child = watched.child
        child.kill_group()
        stack_child.kill_strays({*self._strangers, *(w.child.pid for w in self._all() if w.child.pid)})
        if code == SETUP_ERROR_CODE and not patient:
            raise SetupError(f"{_setup_error(child)} (log: {child.log})")
        if code == UNSERVABLE_CODE and child.command.serves_base_model:  # gunicorn has another meaning for it
            watched.ended = True
            self._report(f"{_setup_error(child)} (log: {child.log})")
            return
        cause = _setup_error(child) if code == SETUP_ERROR_CODE else watched.death(code)
        self._plan_restart(watched, cause, patient)

    def _plan_restart(self, watched: _Watched, cause: str, patient: bool) -> None:
        child, now = watched.child, time.monotonic()
        lived = patient and now - watched.started >= self._policy.window_s
        watched.failures = 1 if lived else watched.failures + 1
        if watched.failures >= self._policy.tries and not patient:
            raise TinsmithError(_gave_up(watched, cause))
        delay = self._policy.delay_s(watched.failures)
        watched.due = now + delay
        self._report(f"{cause}; starting it again in {delay:g} s (log: {child.log})")


def _setup_error(child: Child) -> str:
    """The setup error of a worker: the last line that begins with its name."""
    lines = child.tail(_SEARCHED_LINES)
    named = [line for line in lines if line.startswith(f"{child.command.name}: ")]
    return (named or lines or [f"{child.command.name} cannot start"])[-1]


def _gave_up(watched: _Watched, cause: str) -> str:
    child = watched.child
    head = f"{cause}, {watched.failures} times in a row; the end of {child.log}:"
    return "\n".join([head, *(f"  {line}" for line in child.tail(_TAIL_LINES))])

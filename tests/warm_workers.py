"""Workers of `tinsmith up` that are forked from it, with their slow imports done: a start takes a second, not seven.

Stacks that restart workers often use it, and a few others. The two stacks that most tests share,
the demo and `make extras` start workers as a user does. As a program, it is such a `tinsmith up`, which also restarts
its children with almost no delay.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from unittest import mock

from setproctitle import setproctitle

from app import cli
from app.stack import child, supervisor, up
from app.stack.child import Child, Command
from app.stack.supervisor import RestartPolicy, Supervisor

# What a trainer and a light sampler import, except for what reads the settings when it is imported.
_SLOW = (
    "workers.process.assembly",
    "workers.backends.training.backends",
    "workers.backends.sampling.transformers.backend",
    "workers.models.full_weights",
    "transformers.models.qwen3.modeling_qwen3",
    "celery.bin.celery",
)
# Otherwise the last of six restarts would wait ten seconds.
_PATIENT = RestartPolicy(first_delay_s=0.2, longest_delay_s=0.2)


def use(*more: str) -> None:
    """Makes this process a `tinsmith up` with warm workers, with `more` modules imported."""
    _import_slow(*more)
    supervisor.Child = WarmChild
    up.Supervisor = partial(Supervisor, policy=_PATIENT)


def _import_slow(*more: str) -> None:
    for module in (*_SLOW, *more):
        import_module(module)
    assert threading.active_count() == 1, "a fork beside another thread may find a lock taken"


class WarmChild(Child):
    """A child that does not execute Python again if it is a worker; its log, session and end are those of any child."""

    def start(self) -> None:
        end_with = child.end_with
        if "--base" in self.command.argv:
            end_with = partial(_become, end_with, self.command, self._inherited_fds)
        with mock.patch.object(child, "end_with", end_with):
            super().start()


def _become(end_with: Callable[[int], None], command: Command, inherited_fds: tuple[int, ...], parent: int) -> NoReturn:
    """Is called in the fork, where a child would execute its program: does in this process what that would do."""
    end_with(parent)
    close_fds(inherited_fds)
    os.environ.update(command.environ)
    run_module(command.argv, " ".join(command.argv))


def close_fds(kept: Collection[int]) -> None:
    """Closes what a program would not inherit."""
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in kept:
            with suppress(OSError):  # the folder that was listed
                os.close(number)


def run_module(command: Sequence[str], title: str) -> NoReturn:
    """Does in this process what `command`, a Python with `-m MODULE`, would do, under that title."""
    setproctitle(title)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as in any Python; the fork was to execute any program
        signal.signal(number, signal.SIG_IGN)
    module, *arguments = command[command.index("-m") + 1 :]
    sys.argv = [module, *arguments]
    code = _run(module)
    sys.stdout.flush()
    os._exit(code)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    use()
    sys.exit(cli.main())

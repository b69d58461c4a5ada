"""Warm workers, as in tests/warm_workers.py, whose ranks on this machine are forked too.

The stack of two ranks that most tests share starts them as a user does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import psutil

from app import cli
from tests import warm_workers

_LAUNCHER = "workers.process.torchrun"
# What ranks under DeepSpeed import, and what launches them.
_SLOW = ("deepspeed", "deepspeed.runtime.zero.muon.original_muon", _LAUNCHER)


def use() -> None:
    """Makes this process a `tinsmith up` with warm workers and ranks."""
    warm_workers.use(*_SLOW)
    os.execv = _launch  # what a trainer of several ranks calls


def rank_of(process: psutil.Process) -> int | None:
    """Rank of a worker's process, or None for the launcher. Celery writes a title over that of rank 0."""
    title = " ".join(process.cmdline())
    found = re.match(r"RANK=([0-9]+) ", title)
    return None if _LAUNCHER in title else int(found[1]) if found else 0


class _Rank:
    """A process that waits for a command and an environment to become a rank. It ends if this process ends before."""

    def __init__(self) -> None:
        heard, self._told = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: _become_rank(heard)
        )
        os.close(heard)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with os.fdopen(self._told, "w") as told:
            json.dump([command, environ], told)
        return self._process


def _launch(_: str, command: Sequence[str]) -> NoReturn:
    """Becomes torchrun. The ranks are forked before, as torchrun soon has threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    ranks = [_Rank() for _ in range(int(command[command.index("--nproc-per-node") + 1]))]
    SubprocessHandler._popen = lambda self, args, env: ranks[self.local_rank_id].start(args, env)
    warm_workers.run_module(command, " ".join(command))


def _become_rank(heard: int) -> NoReturn:
    warm_workers.close_fds([heard])
    with os.fdopen(heard) as orders:
        told = orders.read()
    if not told:
        os._exit(1)
    command, environ = json.loads(told)
    os.environ.update(environ)
    warm_workers.run_module(command, f"RANK={environ['RANK']} {' '.join(command)}")


if __name__ == "__main__":
    use()
    sys.exit(cli.main())

"""Several hosts on one machine: loopback addresses, and an `ssh` that runs the command locally as sshd would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
exec env -i HOME="$HOME" PATH="$PATH" SSH_CONNECTION="$host" sh -c "$*"
"""


def install_ssh(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in in `folder`, where this process and its children find it.

    A trainer of one rank, of an earlier test in this process, chose the loopback interface. The hosts would inherit
    the choice, and the second would look for the first at an address on which it does not listen.
    """
    folder.mkdir()
    (folder / "ssh").write_text(_SSH)
    (folder / "ssh").chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        patch.delenv(name, raising=False)


def write_hostfile(path: Path, first: int = 1, second: int = 1) -> Path:
    path.write_text(f"# where the ranks are\n{FIRST} slots={first}\n{SECOND} slots={second}\n")
    return path

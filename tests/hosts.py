"""Several hosts on one machine: loopback addresses, and an `ssh` that runs the command locally as sshd would."""

from __future__ import annotations

import os
from pathlib import Path

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
exec env -i HOME="$HOME" PATH="$PATH" SSH_CONNECTION="$host" sh -c "$*"
"""


def install_ssh(folder: Path) -> dict[str, str]:
    """Puts the stand-in in `folder`; returns the environment in which it is found."""
    folder.mkdir()
    (folder / "ssh").write_text(_SSH)
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def write_hostfile(path: Path, first: int = 1, second: int = 1) -> Path:
    path.write_text(f"# where the ranks are\n{FIRST} slots={first}\n{SECOND} slots={second}\n")
    return path

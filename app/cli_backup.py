"""`tinsmith backup` and `tinsmith restore`: their arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from app import cli_servers

if TYPE_CHECKING:
    from app.cli_servers import Commands

_ABOUT = "organisations, projects, users and keys, usage and audit log"


def add(commands: Commands) -> None:
    """Both take a file, and the servers they are about."""
    backup = _file_command(
        commands,
        "backup",
        f"write {_ABOUT} to a file",
        f"Write {_ABOUT} to a new file, the last two up to this hour. Checkpoints are not in it: the object store "
        "holds them, to be kept like any data. Keys are in it as digests alone.",
    )
    backup.set_defaults(run=_backup)
    restore = _file_command(
        commands,
        "restore",
        f"bring {_ABOUT} back from a file",
        f"Bring back {_ABOUT} that are missing, from a file that `tinsmith backup` wrote. What is there stays as it "
        "is. After an emptied state server alone, `tinsmith rebuild` is enough.",
    )
    restore.set_defaults(run=_restore)


def _file_command(commands: Commands, name: str, about: str, more: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=more, allow_abbrev=False)
    parser.set_defaults(parser=parser)
    parser.add_argument("file", type=Path, metavar="FILE")
    cli_servers.add_stack_options(parser)
    return parser


def _backup(arguments: argparse.Namespace) -> int:
    from app.stack.backup import backup

    return backup(cli_servers.options(arguments), arguments.file)


def _restore(arguments: argparse.Namespace) -> int:
    from app.stack.backup import restore

    return restore(cli_servers.options(arguments), arguments.file)

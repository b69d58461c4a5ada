"""The arguments of the commands that prepare a machine for a stack: `tinsmith doctor`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from app import cli_admin

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]


def add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, the settings and the servers",
        description="Check versions, GPUs, disks, the port, the state server, the object store and the files of each "
        "base model, and print a line for each, with a remedy where one is needed. The exit code is 1 if something is "
        "wrong. Nothing is changed, except that a missing bucket is created.",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=_doctor, parser=doctor)
    doctor.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")
    cli_admin.add_stack_options(doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from app.commands.doctor import doctor

    return doctor(cli_admin.options(arguments), as_json=arguments.as_json)

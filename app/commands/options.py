"""The arguments of the commands that prepare a stack: `tinsmith init`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]


def add_init(commands: Commands) -> None:
    parser = commands.add_parser(
        "init",
        help="write a config file for this machine",
        description="Write a config file for `tinsmith up --config`: workers that fit this machine's GPUs or CPU, and "
        "every other setting as a comment with its default. A file that exists stays as it is.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_init, parser=parser)
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=Path("tinsmith.toml"),
        metavar="FILE",
        help="file to write (default tinsmith.toml)",
    )
    parser.add_argument(
        "--model",
        metavar="PATH_OR_HUB_ID",
        help="serve the model in this folder or of this Hugging Face hub id (default: the bundled "
        "SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")


def _init(arguments: argparse.Namespace) -> int:
    from app.commands.init import init

    return init(arguments.file, arguments.model, force=arguments.force, as_json=arguments.as_json)

"""The options that several commands have: those that select a stack, and `--json`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.stack.config import Options


def add_stack_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a stack. Without --redis it is the stack that runs on the data folder."""
    add_folder_options(parser)
    add_outside_options(parser)


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML settings; the options here override it (default: the file TINSMITH_SETTINGS names)",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="the stack's data folder (default ./tinsmith-data)"
    )


def folder_options(arguments: argparse.Namespace) -> Options:
    """Returns the values of the options that `add_folder_options` adds."""
    from app.stack.config import Options

    return Options(config=arguments.config, data_dir=arguments.data_dir)


def add_outside_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers of your own")
    group.add_argument(
        "--redis", metavar="URL", help="use this Redis, such as redis://host:6379/0, not an embedded Valkey"
    )
    group.add_argument(
        "--s3",
        metavar="URL",
        help="keep checkpoints in this bucket, such as http://host:9000/tinsmith, not in the data dir",
    )


def stack_options(arguments: argparse.Namespace) -> Options:
    """Returns the values of the options that `add_stack_options` adds."""
    return replace(folder_options(arguments), redis=arguments.redis, s3=arguments.s3)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")

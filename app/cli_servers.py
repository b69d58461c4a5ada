"""The options of commands that work on a stack from outside: which servers they are about."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.stack.config import Options

    Commands = argparse._SubParsersAction[Any]


def add_stack_options(parser: argparse.ArgumentParser) -> None:
    """Without --redis it is the stack that runs on the data folder."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML settings; the options here override it (default the file TINSMITH_SETTINGS names, if it is set)",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="the stack's data folder (default ./tinsmith-data)"
    )
    add_outside_options(parser)


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


def options(arguments: argparse.Namespace) -> Options:
    """What `add_stack_options` asked for."""
    from app.stack.config import Options

    return Options(config=arguments.config, data_dir=arguments.data_dir, redis=arguments.redis, s3=arguments.s3)

"""The arguments of the commands that prepare a stack: `tinsmith init`, `models` and `completion`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.commands import parsers

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


def add_models(commands: Commands) -> None:
    models = commands.add_parser(
        "models",
        help="list base models, or download one",
        description="List the base models of the settings, or of the stack that runs on the data dir, and those in the "
        "Hugging Face hub's cache.",
        allow_abbrev=False,
    )
    models.set_defaults(run=_models, parser=models)
    models.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")
    parsers.add_folder_options(models)
    add = models.add_subparsers(metavar="ACTION").add_parser(
        "add",
        help="download a model from the Hugging Face hub",
        description="Check that LoRA can train the model, download it into the hub's cache (HF_HOME), and print the "
        "lines for the config file. HF_TOKEN in the environment is used for gated and private models. Run it again to "
        "continue a download.",
        allow_abbrev=False,
    )
    add.set_defaults(run=_add_model, parser=add)
    add.add_argument("hub_id", metavar="HUB_ID", help="the model's id, such as Qwen/Qwen3-0.6B")
    add.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")


def add_completion(commands: Commands, program: argparse.ArgumentParser) -> None:
    """Adds the command that prints a script which completes the arguments of `program`."""
    parser = commands.add_parser(
        "completion",
        help="print a script for completion in a shell",
        description="Print a script that completes commands, options and files in a shell. Write it to the file that "
        "the shell reads, such as ~/.local/share/bash-completion/completions/tinsmith.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=partial(_completion, program), parser=parser)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def _completion(program: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from app.commands.completion import completion

    return completion(program, arguments.shell)


def _models(arguments: argparse.Namespace) -> int:
    from app.commands.models import show_models
    from app.stack.config import Options

    options = Options(config=arguments.config, data_dir=arguments.data_dir)
    return show_models(options, as_json=arguments.as_json)


def _add_model(arguments: argparse.Namespace) -> int:
    from app.commands.models import add_model

    return add_model(arguments.hub_id, as_json=arguments.as_json)


def _init(arguments: argparse.Namespace) -> int:
    from app.commands.init import init

    return init(arguments.file, arguments.model, force=arguments.force, as_json=arguments.as_json)

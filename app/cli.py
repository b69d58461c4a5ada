"""The `tinsmith` command. This module holds only arguments and exit codes; the code of a command is imported when it
runs.

Exit codes: 0 done or stopped; 1 a process kept failing, `doctor` found something wrong, or there is no such call or
session; 2 something must be changed first (one line on stderr names it); 130 Ctrl-C broke the command off; 141 nothing
reads the output any more.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from app.commands import options, parsers
from app.errors import SetupError, TinsmithError
from app.stack.redaction import hide_secrets
from app.stack.terminal import warn

_UP_EXAMPLES = """\
examples:
  tinsmith up
      the bundled SmolLM2-135M-Instruct, on this machine's GPU or CPU
  tinsmith up --base-model Qwen/Qwen3-0.6B=/models/qwen3-0.6b --sampler vllm --data-dir /srv/tinsmith
      a model of your own, sampled by vLLM
  tinsmith up --config tinsmith.toml --port 9000
      everything from a file (GPUs, ZeRO stage, engine arguments), with another port

Secrets can come from the environment: TINSMITH_API_KEY, TINSMITH_OPERATOR_KEY, TINSMITH_REDIS_URL, TINSMITH_BROKER_URL,
TINSMITH_S3_ACCESS_KEY, TINSMITH_S3_SECRET_KEY, TINSMITH_URL_SECRET, TINSMITH_CAPTURE_SECRET. Ctrl-C stops everything;
the same data dir brings everything back.
"""

_LAST_PORT = 65_535


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without printing the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


class _PrintVersion(argparse.Action):
    """The `--version` option: prints the version as the command `version` does, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> NoReturn:
        parser.exit(_version(namespace))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.parser.error(f"unknown option or argument {unknown[0]!r}")
        hide_secrets(arguments)
        return int(arguments.run(arguments))
    except SetupError as error:
        return _fail(error, 2)
    except TinsmithError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush at the end
        return 128 + signal.SIGPIPE


def _fail(error: TinsmithError, code: int) -> int:
    warn(f"tinsmith: {error}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tinsmith",
        description="A self-hosted server for the Tinker fine-tuning API.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, default=argparse.SUPPRESS, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parsers.add_init(commands)
    parsers.add_models(commands)
    _add_up(commands)
    _add_demo(commands)
    _add_status(commands)
    _add_logs(commands)
    _add_cancel(commands)
    _add_rebuild(commands)
    parsers.add_admin(commands)
    parsers.add_backup(commands)
    _add_import(commands)
    _add_flower(commands)
    _add_doctor(commands)
    parsers.add_completion(commands, parser)
    about = commands.add_parser("version", help="print the version", description="Print the version.")
    about.set_defaults(run=_version, parser=about)
    return parser


def _add_up(commands: argparse._SubParsersAction[_Parser]) -> None:
    up = commands.add_parser(
        "up",
        help="run the whole stack in the foreground",
        description="Run the API, trainer and sampler workers and an embedded Valkey server in the foreground,\n"
        "and print `ready URL` once requests are served.",
        epilog=_UP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    up.set_defaults(run=_up, parser=up)
    up.add_argument("--quiet", action="store_true", help="print only warnings and `ready URL`")
    _add_server_options(up)
    _add_model_options(up)
    options.add_outside_options(up)


def _add_status(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "workers, runs and waiting calls of the stack"
    status = commands.add_parser("status", help=f"show {about}", description=f"Show {about}.", allow_abbrev=False)
    status.set_defaults(run=_status, parser=status)
    options.add_json_option(status)
    top = commands.add_parser(
        "top", help=f"show {about}, live", description=f"Show {about}, every second, until Ctrl-C.", allow_abbrev=False
    )
    top.set_defaults(run=_top, parser=top)
    for parser in (status, top):
        parser.add_argument(
            "--runs", type=_count, default=20, metavar="N", help="greatest number of runs to show (default 20)"
        )
        options.add_stack_options(parser)


def _add_logs(commands: argparse._SubParsersAction[_Parser]) -> None:
    logs = commands.add_parser(
        "logs",
        help="show the state, the times and the log lines of one call",
        description="Show the kind, the run, the times, the state and the error of one call, and the lines that name "
        "it in the logs of the API and the workers. The exit code is 1 if there is no such call.",
        allow_abbrev=False,
    )
    logs.set_defaults(run=_logs, parser=logs)
    logs.add_argument("request_id", metavar="REQUEST_ID", help="the id of the future, such as SESSION:train:0:7")
    options.add_json_option(logs)
    options.add_stack_options(logs)


def _add_cancel(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "end the runs and samples of a session or a project"
    cancel = commands.add_parser(
        "cancel",
        help=about,
        description=f"{about.capitalize()}. Calls that have no result yet fail, and the runs cannot be used again; "
        "their checkpoints stay. The exit code is 1 if there is no such session or project, or if the answer is no.",
        allow_abbrev=False,
    )
    cancel.set_defaults(run=_cancel, parser=cancel)
    cancel.add_argument("target", metavar="SESSION|PROJECT", help="the id of a session or of a project")
    cancel.add_argument("--yes", action="store_true", dest="sure", help="do not ask for confirmation")
    options.add_json_option(cancel)
    options.add_stack_options(cancel)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, the settings and the servers",
        description="Check versions, GPUs, disks, the port, the state server, the object store and the files of each "
        "base model, and print a line for each, with a remedy where one is needed. The exit code is 1 if something is "
        "wrong. Nothing is changed, except that a missing bucket is created.",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=_doctor, parser=doctor)
    options.add_json_option(doctor)
    options.add_stack_options(doctor)


def _add_rebuild(commands: argparse._SubParsersAction[_Parser]) -> None:
    rebuild = commands.add_parser(
        "rebuild",
        help="restore runs and checkpoints of an emptied state server",
        description="Restore runs and checkpoints from the manifests in the object store, after the state server was "
        "emptied or set back to an old backup. Also restores accounts, and this month's spending from the kept usage. "
        "Adds what is missing, and prints what it cannot restore. Without --redis it uses the running stack of the "
        "data dir.",
        allow_abbrev=False,
    )
    rebuild.set_defaults(run=_rebuild, parser=rebuild)
    options.add_stack_options(rebuild)


def _add_import(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "make a checkpoint of weights that were made elsewhere"
    imports = commands.add_parser(
        "import",
        help=about,
        description="Make a checkpoint of a folder with the PEFT files of a LoRA adapter, or with all weights of a "
        "model in Hugging Face's format, and print its tinker:// path. The stack must be running, with a trainer of "
        "the base model.",
        allow_abbrev=False,
    )
    imports.set_defaults(run=_import, parser=imports)
    imports.add_argument("folder", type=Path, metavar="FOLDER")
    imports.add_argument("--base-model", required=True, metavar="NAME", help="the base model's name on this server")
    imports.add_argument("--project", metavar="ID", help="the project that will own it (default: the only one)")
    options.add_stack_options(imports)


def _add_flower(commands: argparse._SubParsersAction[_Parser]) -> None:
    flower = commands.add_parser(
        "flower",
        help="run Celery's dashboard of the stack",
        description="Run Flower, which shows every call with its model, state and runtime, in the foreground. It goes "
        "on when the stack is stopped and started again. For a login, which an address other than the loopback one "
        "needs, set FLOWER_BASIC_AUTH=user:password in the environment.",
        allow_abbrev=False,
    )
    flower.set_defaults(run=_flower, parser=flower)
    flower.add_argument("--address", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    flower.add_argument("--port", type=_port, default=5555, help="port to listen on (default 5555)")
    options.add_folder_options(flower)


def _add_server_options(up: argparse.ArgumentParser) -> None:
    group = up.add_argument_group("server")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML settings; the options here override it")
    group.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default 8000)")
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of all data (default ./tinsmith-data)")
    group.add_argument(
        "--api-key",
        metavar="tml-...",
        help="API key of the clients (default: made once and kept in DIR/api-key; prefer TINSMITH_API_KEY where others "
        "can list processes)",
    )


def _add_model_options(up: argparse.ArgumentParser) -> None:
    group = up.add_argument_group("models and workers")
    group.add_argument(
        "--base-model",
        type=_named_path,
        action="append",
        default=[],
        metavar="NAME=PATH_OR_HUB_ID",
        help="serve this model under NAME; repeat for more (default: the bundled SmolLM2-135M-Instruct)",
    )
    group.add_argument("--trainer", choices=("deepspeed", "torch"), help="training backend (default deepspeed)")
    group.add_argument(
        "--sampler",
        choices=("vllm", "transformers"),
        help="sampling backend (default vllm where it is installed and there is a GPU, else transformers)",
    )
    group.add_argument("--trainers", type=_from_0, metavar="N", help="trainer workers for each base model (default 1)")
    group.add_argument("--samplers", type=_from_0, metavar="N", help="sampler workers for each base model (default 1)")
    group.add_argument("--ranks", type=_count, metavar="N", help="processes in one trainer (default 1)")
    group.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="DeepSpeed ZeRO stage (default 2)")


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="fine-tune the bundled model and show the difference",
        description="Start a separate stack, fine-tune SmolLM2-135M-Instruct through the tinker SDK on 36 short "
        "conversations, and print the model's answers before and after. The number of training steps (12 to 24) "
        "depends on the machine's speed, so that the demo takes about five minutes at most, unless 12 steps take "
        "longer.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "--data-dir",
        type=Path,
        default=Path("data/demo"),
        metavar="DIR",
        help="folder of the stack's data, and of the results in demo.json (default ./data/demo)",
    )
    demo.set_defaults(run=_demo, parser=demo)


def _named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH_OR_HUB_ID, such as my-model=/models/my-model")
    return name, path


def _count(text: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _from_0(text: str) -> int:
    return _count(text, 0)


def _port(text: str) -> int:
    if (port := _from_0(text)) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is above {_LAST_PORT}, the last port")
    return port


def _up(arguments: argparse.Namespace) -> int:
    from app.stack.config import Options
    from app.stack.up import up

    given = {key: value for key, value in vars(arguments).items() if key not in ("run", "parser", "base_model")}
    return up(Options(base_models=tuple(arguments.base_model), **given))


def _status(arguments: argparse.Namespace) -> int:
    from app.commands.status import status

    return status(options.stack_options(arguments), runs=arguments.runs, as_json=arguments.as_json)


def _top(arguments: argparse.Namespace) -> int:
    from app.commands.status import top

    return top(options.stack_options(arguments), runs=arguments.runs)


def _logs(arguments: argparse.Namespace) -> int:
    from app.commands.logs import logs

    return logs(options.stack_options(arguments), arguments.request_id, as_json=arguments.as_json)


def _cancel(arguments: argparse.Namespace) -> int:
    from app.commands.cancel import cancel

    return cancel(options.stack_options(arguments), arguments.target, sure=arguments.sure, as_json=arguments.as_json)


def _doctor(arguments: argparse.Namespace) -> int:
    from app.commands.doctor import doctor

    return doctor(options.stack_options(arguments), as_json=arguments.as_json)


def _rebuild(arguments: argparse.Namespace) -> int:
    from app.commands.recovery import rebuild

    return rebuild(options.stack_options(arguments))


def _import(arguments: argparse.Namespace) -> int:
    from app.commands.importing import import_folder

    return import_folder(options.stack_options(arguments), arguments.folder, arguments.base_model, arguments.project)


def _flower(arguments: argparse.Namespace) -> NoReturn:
    from app.commands.flower import flower

    flower(options.folder_options(arguments), arguments.address, arguments.port)


def _demo(arguments: argparse.Namespace) -> int:
    from app.demo.run import demo

    demo(arguments.data_dir)
    return 0


def _version(_: argparse.Namespace) -> int:
    try:
        print(f"tinsmith {version('tinsmith')}")
    except PackageNotFoundError:
        raise SetupError("tinsmith is not installed; run `make setup`") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The arguments of `tinsmith admin`, `backup`, `restore`, `init`, `models` and `completion`.

Other modules of this folder do the work; they are imported when a command runs.
"""

from __future__ import annotations

import argparse
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.commands.options import (
    add_folder_options,
    add_json_option,
    add_stack_options,
    folder_options,
    stack_options,
)
from app.domain import limits
from app.domain.accounts import ROLES, SCOPES

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]

_NOBODY = _UNLIMITED = "none"
_DEFAULT = "default"
_DAY_S = 86_400
_MOST_DAYS = 36_500

_ABOUT = "organisations, projects, users and keys, usage and audit log"


def add_admin(commands: Commands) -> None:
    """Adds `tinsmith admin`. An organisation has projects and users. A user has keys, and a role in each project he may
    use."""
    about = "organisations, projects, users, API keys and limits"
    admin = commands.add_parser("admin", help=about, description=f"Make, change and list {about}.", allow_abbrev=False)
    admin.set_defaults(parser=admin)
    kinds = admin.add_subparsers(metavar="KIND", required=True)
    _add_organisations(_kind(kinds, "org", "organisations"))
    _add_projects(_kind(kinds, "project", "projects, which own runs and checkpoints"))
    _add_users(_kind(kinds, "user", "users and their roles"))
    _add_keys(_kind(kinds, "key", "API keys"))
    _add_limits(_kind(kinds, "limits", "limits of a project, or of a key"))
    _add_audit(kinds)
    _add_usage(kinds)


def _add_organisations(actions: Commands) -> None:
    create = _action(actions, "create", "add_organisation", "make an organisation and print its id")
    create.add_argument("name", metavar="NAME")
    _action(actions, "list", "list_organisations", "list organisations")


def _add_projects(actions: Commands) -> None:
    create = _action(actions, "create", "add_project", "make a project and print its id")
    create.add_argument("name", metavar="NAME")
    create.add_argument("--org", required=True, metavar="ID")
    _action(actions, "list", "list_projects", "list projects")


def _add_users(actions: Commands) -> None:
    create = _action(actions, "create", "add_user", "make a user and print the user's id")
    create.add_argument("email", metavar="EMAIL")
    create.add_argument("--org", required=True, metavar="ID")
    role = _action(actions, "role", "set_role", "set the role of a user in a project of the same organisation")
    role.add_argument("user", metavar="USER")
    role.add_argument("project", metavar="PROJECT")
    role.add_argument(
        "role",
        choices=[*ROLES, _NOBODY],
        help="viewer: only reads; member: also trains, samples and saves; admin: may do everything; none: no role",
    )
    remove = _action(actions, "remove", "remove_user", "remove a user; the user's keys stop working at once")
    remove.add_argument("user", metavar="USER")
    _action(actions, "list", "list_users", "list users with their roles")


def _add_keys(actions: Commands) -> None:
    create = _action(actions, "create", "add_key", "make a key and print it; it cannot be shown again")
    create.add_argument("--user", required=True, metavar="ID")
    create.add_argument(
        "--project", metavar="ID", help="project of calls that name none (default: the user's only project)"
    )
    create.add_argument(
        "--scopes",
        type=_scopes,
        default=sorted(SCOPES),
        metavar="NAME,...",
        help=f"changes that the key may make: some of {', '.join(sorted(SCOPES))}, or {_NOBODY} for a key that only "
        "reads (default all)",
    )
    create.add_argument(
        "--days", type=_days, dest="lifetime_s", metavar="N", help="days until the key expires (default never)"
    )
    create.add_argument("--name", default="", help="name of the key")
    create.add_argument("--note", default="", help="note on the purpose of the key")
    revoke = _action(actions, "revoke", "revoke_key", "revoke a key; it stops working at once")
    revoke.add_argument("key", metavar="KEY", help="id of the key: the part before the dot")
    _action(actions, "list", "list_keys", "list keys")


def _add_limits(actions: Commands) -> None:
    change = _action(
        actions, "set", "set_limits", "change limits of a project or a key; the other limits stay as they are"
    )
    change.add_argument("id", metavar="ID")
    for name in limits.NAMES:
        change.add_argument(
            f"--{name.replace('_', '-')}",
            type=partial(_limit, int if name in limits.COUNTS else float),
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"a number, {_UNLIMITED}, or {_DEFAULT} for the value of limits.project in the settings",
        )
    _action(actions, "list", "list_limits", "list projects and keys that have limits of their own")


def _add_audit(kinds: Commands) -> None:
    about = "the audit log of a project or organisation for one day"
    audit = kinds.add_parser("audit", help=about, description=f"Print {about}.", allow_abbrev=False)
    audit.add_argument("scope", metavar="ID", help="id of the project or organisation")
    audit.add_argument("--day", type=_date, metavar="YYYY-MM-DD", help="UTC (default today)")
    add_stack_options(audit)
    audit.set_defaults(run=_show_audit, parser=audit)


def _add_usage(kinds: Commands) -> None:
    about = "usage and cost of a project's runs in one month"
    usage = kinds.add_parser("usage", help=about, description=f"Print {about}.", allow_abbrev=False)
    usage.add_argument("project", metavar="ID", help="id of the project")
    usage.add_argument("--month", type=_month, metavar="YYYY-MM", help="UTC (default this month)")
    add_stack_options(usage)
    usage.set_defaults(run=_show_usage, parser=usage)


def _kind(kinds: Commands, name: str, about: str) -> Commands:
    kind = kinds.add_parser(name, help=about, description=_sentence(about), allow_abbrev=False)
    kind.set_defaults(parser=kind)
    actions: Commands = kind.add_subparsers(metavar="ACTION", required=True)
    return actions


def _action(actions: Commands, name: str, function: str, about: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=about, description=_sentence(about), allow_abbrev=False
    )
    add_stack_options(action)
    action.set_defaults(run=_run, function=function, parser=action)
    return action


def _sentence(text: str) -> str:
    """The text as a sentence. `capitalize` would write `Api keys`."""
    return f"{text[0].upper()}{text[1:]}."


def _run(arguments: argparse.Namespace) -> int:
    from app.commands import admin

    return admin.run(stack_options(arguments), arguments.function, arguments)


def _show_audit(arguments: argparse.Namespace) -> int:
    from app.commands import admin

    return admin.show_audit(stack_options(arguments), arguments.scope, arguments.day)


def _show_usage(arguments: argparse.Namespace) -> int:
    from app.commands import admin

    return admin.show_usage(stack_options(arguments), arguments.project, arguments.month)


def _month(text: str) -> date:
    try:
        return date.fromisoformat(f"{text}-01")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a month such as 2026-11") from None


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day such as 2026-11-22") from None


def _scopes(text: str) -> list[str]:
    names = [] if text == _NOBODY else text.split(",")
    if unknown := set(names) - SCOPES:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not a scope; the scopes are {', '.join(sorted(SCOPES))}")
    return names


def _limit(number: type[int] | type[float], text: str) -> float | str | None:
    try:
        return text if text == _DEFAULT else None if text == _UNLIMITED else number(text)
    except ValueError:
        kind = "whole number" if number is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {kind}, {_UNLIMITED} or {_DEFAULT}") from None


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= _MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days above 0, and at most {_MOST_DAYS:,}")
    return days * _DAY_S


def add_backup(commands: Commands) -> None:
    """Adds `backup` and `restore`. Both take a file and the options that select the servers."""
    backup = _file_command(
        commands,
        "backup",
        f"write {_ABOUT} to a file",
        f"Write {_ABOUT} to a new file. Usage and audit log are complete up to this hour. Checkpoints are not "
        "included: back up the object store, which holds them. Of API keys only digests are written.",
    )
    backup.set_defaults(run=_backup)
    restore = _file_command(
        commands,
        "restore",
        f"restore {_ABOUT} from a file",
        f"Restore missing {_ABOUT} from a file that `tinsmith backup` wrote. Existing data is not changed. If only "
        "the state server was emptied, `tinsmith rebuild` is enough.",
    )
    restore.set_defaults(run=_restore)


def _file_command(commands: Commands, name: str, about: str, more: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=more, allow_abbrev=False)
    parser.set_defaults(parser=parser)
    parser.add_argument("file", type=Path, metavar="FILE")
    add_stack_options(parser)
    return parser


def _backup(arguments: argparse.Namespace) -> int:
    from app.commands.recovery import backup

    return backup(stack_options(arguments), arguments.file)


def _restore(arguments: argparse.Namespace) -> int:
    from app.commands.recovery import restore

    return restore(stack_options(arguments), arguments.file)


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
    add_json_option(parser)


def add_models(commands: Commands) -> None:
    models = commands.add_parser(
        "models",
        help="list base models, or download one",
        description="List the base models of the settings, or of the stack that runs on the data dir, and those in the "
        "Hugging Face hub's cache.",
        allow_abbrev=False,
    )
    models.set_defaults(run=_models, parser=models)
    add_json_option(models)
    add_folder_options(models)
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
    add_json_option(add)


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

    return show_models(folder_options(arguments), as_json=arguments.as_json)


def _add_model(arguments: argparse.Namespace) -> int:
    from app.commands.models import add_model

    return add_model(arguments.hub_id, as_json=arguments.as_json)


def _init(arguments: argparse.Namespace) -> int:
    from app.commands.init import init

    return init(arguments.file, arguments.model, force=arguments.force, as_json=arguments.as_json)

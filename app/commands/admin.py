"""The actions of `tinsmith admin` and their output. Ids and keys are printed alone on a line, for scripts."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime

from app.commands.connection import account_service, open_store, reached, settings_of
from app.domain.accounts import Key, Organisation, Project, User
from app.domain.limits import NAMES
from app.domain.prices import total
from app.errors import BadRequest, NotFound, SetupError
from app.services.tenants.accounts import AccountService
from app.services.tenants.audit import AuditService
from app.services.tenants.authentication import project_of
from app.services.tenants.spending import hours_of
from app.services.tenants.usage import UsageService
from app.services.views import day_text
from app.settings import Settings
from app.stack.config import Options
from app.stack.terminal import row, show
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.base import ObjectStore
from app.stores.pages import PageFiles
from app.stores.redis.client import connect
from app.stores.redis.pages import Ledgers, RedisPages
from app.stores.redis.records import RedisRecords

Action = Callable[[AccountService, Namespace], Iterator[str]]


def run(options: Options, action: str, asked: Namespace) -> int:
    """Runs one action. Raises SetupError when the action cannot be done as asked, Unavailable when a store is away."""
    settings = settings_of(options)
    accounts = account_service(settings, open_store(settings, may_be_away=True))
    try:
        with reached(settings):
            show(*_ACTIONS[action](accounts, asked))
    except (BadRequest, NotFound) as error:
        raise SetupError(str(error)) from None
    return 0


def _add_organisation(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    yield accounts.add_organisation(asked.name).id


def _list_organisations(accounts: AccountService, _: Namespace) -> Iterator[str]:
    yield row("id", "created", "name")
    yield from (row(found.id, day_text(found.created), found.name) for found in accounts.all(Organisation))


def _add_project(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    yield accounts.add_project(asked.org, asked.name).id


def _list_projects(accounts: AccountService, _: Namespace) -> Iterator[str]:
    yield row("id", "organisation", "created", "name")
    for found in accounts.all(Project):
        yield row(found.id, found.organisation, day_text(found.created), found.name)


def _add_user(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    yield accounts.add_user(asked.org, asked.email).id


def _set_role(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    yield _roles(accounts.set_role(asked.user, asked.project, None if asked.role == "none" else asked.role))


def _remove_user(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    yield f"{accounts.remove_user(asked.user).id} was removed"


def _list_users(accounts: AccountService, _: Namespace) -> Iterator[str]:
    yield row("id", "organisation", "created", "email", "roles")
    for found in accounts.all(User):
        roles = "removed" if found.removed else _roles(found)
        yield row(found.id, found.organisation, day_text(found.created), found.email, roles)


def _add_key(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    project = asked.project or _only_project(accounts, asked.user)
    _, text = accounts.add_key(
        asked.user, project, asked.scopes, name=asked.name, note=asked.note, lifetime_s=asked.lifetime_s
    )
    yield text


def _only_project(accounts: AccountService, user: str) -> str:
    roles = accounts.user(user).roles
    if len(roles) != 1:
        raise BadRequest(f"user {user} is in {len(roles)} projects: choose one for the key with --project")
    return next(iter(roles))


def _revoke_key(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    yield f"{accounts.revoke(asked.key).id} was revoked"


def _list_keys(accounts: AccountService, _: Namespace) -> Iterator[str]:
    yield row("id", "user", "project", "created", "state", "scopes", "name")
    for key in accounts.all(Key):
        scopes = ",".join(key.scopes) or "none"
        yield row(key.id, key.user, key.project, day_text(key.created), _state(key), scopes, key.name)


def _set_limits(accounts: AccountService, asked: Namespace) -> Iterator[str]:
    said = {name: getattr(asked, name) for name in NAMES if hasattr(asked, name)}
    default = {name for name, value in said.items() if value == "default"}
    limits = {name: value for name, value in said.items() if name not in default}
    try:
        yield _limits(accounts.set_limits(asked.id, limits, default=default))
    except NotFound:
        raise NotFound(f"there is no project or key {asked.id!r}") from None


def _list_limits(accounts: AccountService, _: Namespace) -> Iterator[str]:
    yield row("id", "limits")
    found: list[Project | Key] = [*accounts.all(Project), *accounts.all(Key)]
    yield from (row(account.id, _limits(account)) for account in found if account.limits)


def _limits(account: Project | Key) -> str:
    own = {name: "none" if value is None else f"{value}" for name, value in account.limits.items()}
    return " ".join(f"{name}={own[name]}" for name in NAMES if name in own) or "those of the settings"


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return f"revoked {day_text(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    return f"{'expired' if key.expires_at <= time.time() else 'until'} {day_text(key.expires_at)}"


def _roles(user: User) -> str:
    return " ".join(f"{project}={role}" for project, role in user.roles.items()) or "in no project"


_ACTIONS: dict[str, Action] = {
    "add_organisation": _add_organisation,
    "list_organisations": _list_organisations,
    "add_project": _add_project,
    "list_projects": _list_projects,
    "add_user": _add_user,
    "set_role": _set_role,
    "remove_user": _remove_user,
    "list_users": _list_users,
    "add_key": _add_key,
    "revoke_key": _revoke_key,
    "list_keys": _list_keys,
    "set_limits": _set_limits,
    "list_limits": _list_limits,
}


def show_audit(options: Options, scope: str, day: date | None) -> int:
    """Prints the audit log of a project or organisation for one day (UTC; None: today). Raises SetupError, or
    Unavailable when a store is away."""
    settings = settings_of(options)
    objects, client = open_store(settings), connect(settings.redis.url)
    records = RedisRecords(client, settings.engine)
    log = AuditService(Ledgers(RedisPages(client, settings.engine), PageFiles(objects)), records)
    with reached(settings):
        asked = day or datetime.fromtimestamp(records.now(), UTC).date()
        entries = list(log.of([scope], "all", asked))
        if not entries:
            _check_known(settings, objects, "audit", scope, Project, Organisation)
        for entry in entries:
            show(row(entry["timestamp"], entry["event"], json.dumps(entry["event_details"])))
    return 0


def show_usage(options: Options, project: str, month: date | None) -> int:
    """Prints the usage and cost of each run of a project in one month (UTC; None: this month), and the sum of the
    costs. Raises SetupError, or Unavailable when a store is away."""
    settings = settings_of(options)
    objects, client = open_store(settings), connect(settings.redis.url)
    records = RedisRecords(client, settings.engine)
    ledgers = Ledgers(RedisPages(client, settings.engine), PageFiles(objects))
    with reached(settings):
        first = month or datetime.fromtimestamp(records.now(), UTC).date().replace(day=1)
        rows = UsageService(ledgers, records, settings.prices_of).by_run([project], hours_of(first))
        if not rows:
            _check_known(settings, objects, "usage", project, Project)
    show(row("run", "base model", "trained", "prefilled", "cached", "sampled", "device s", "GB-hours", "US dollars"))
    for one in rows:
        amounts = (f"{one[f'{kind}_tokens']}" for kind in ("training", "prefill", "cached_prefill", "sampled"))
        measured = f"{one['device_seconds']:.3f}", f"{one['gigabyte_hours']:.6f}"
        show(row(one["run_id"] or "-", one["base_model"], *amounts, *measured, _dollars(one["estimated_cost_usd"])))
    show(row("total", *[""] * 7, _dollars(total([one["estimated_cost_usd"] for one in rows]))))
    return 0


def _check_known(
    settings: Settings, objects: ObjectStore, ledger: str, id_: str, *kinds: type[Project] | type[Organisation]
) -> None:
    """Raises SetupError for an id without an account, without pages of the ledger and without a key of the settings."""
    if id_ in map(project_of, settings.api_keys) or any(objects.list(f"{ledger}/{id_}/")):
        return
    for kind in kinds:
        with suppress(NotFound):
            AccountFiles(objects).newest(kind, id_)
            return
    raise SetupError(f"there is no {' or '.join(kind.__name__.lower() for kind in kinds)} {id_!r}")


def _dollars(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:.6f}"

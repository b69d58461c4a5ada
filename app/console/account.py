"""The console's pages about the caller's key and its projects: limits, usage, storage, and for admins the audit log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from flask import Blueprint, render_template, request

from app.api.base import current_caller, services
from app.domain.results import CACHED, PREFILLED, SAMPLED, SAVED, TRAINED
from app.services.tenants.usage import LONGEST

_HOUR = timedelta(hours=1)
_COLUMNS = {
    "Trained tokens": TRAINED,
    "Sampled tokens": SAMPLED,
    "Prefilled tokens": PREFILLED,
    "Tokens from the cache": CACHED,
    "Saves": SAVED,
}


def add(blueprint: Blueprint) -> None:
    """Adds the pages to the console."""
    blueprint.add_url_rule("/account", "account", _show_account)
    blueprint.add_url_rule("/events", "events", _show_events)


def _show_account() -> str:
    """The key, the limits of its projects and their use. An admin also sees the usage and the storage."""
    caller = current_caller()
    limits = {project: services().quotas.describe(caller, project) for project in sorted(caller.roles)}
    usage: list[tuple[str, str, Counter[str]]] = []
    stored: list[dict[str, Any]] = []
    if _is_admin():
        end = datetime.fromtimestamp(services().records.now(), UTC).replace(minute=0, second=0, microsecond=0) + _HOUR
        usage = _by_day(services().usage.events(caller, end - LONGEST, end)["data"])
        stored = services().usage.stored(caller, None)
    key = services().own_key.describe(caller)
    shown = {"usage": usage, "columns": _COLUMNS, "stored": stored, "days": LONGEST.days}
    return render_template("account.html", key=key, limits=limits, is_admin=_is_admin(), **shown)


def _show_events() -> str:
    """The audit log of one day. Raises Forbidden, and BadRequest for a text that is no day."""
    today = datetime.fromtimestamp(services().records.now(), UTC).date()
    day = request.args.get("day", today, date.fromisoformat)
    entries = services().audit.read(current_caller(), "all", day)
    near = {"before": day - timedelta(days=1), "after": day + timedelta(days=1) if day < today else None}
    return render_template("events.html", day=day, entries=entries[::-1], **near)


def _is_admin() -> bool:
    caller = current_caller()
    return any(caller.may("admin", project) for project in caller.roles)


def _by_day(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, Counter[str]]]:
    """The usage of each day (UTC) and base model, the newest day first: amounts by kind."""
    found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for event in events:
        info = event["event_info"]
        kind = CACHED if info.get("cached") else info["type"]
        if kind in _COLUMNS.values():
            amount = info.get("token_count", info.get("count"))
            found[event["bucket_start"][:10], event["base_model"]][kind] += amount
    return [(day, model, found[day, model]) for day, model in sorted(found, key=lambda one: one[0], reverse=True)]

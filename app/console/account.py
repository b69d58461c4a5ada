"""The console's pages about the caller's key and its projects: limits, usage, storage, and for admins the audit log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from flask import Blueprint, render_template, request

from app.api.base import current_caller, services
from app.domain.prices import total
from app.domain.results import CACHED, PREFILLED, SAMPLED, SAVED, TRAINED
from app.errors import BadRequest
from app.ids import checkpoint_path_prefix, session_of
from app.services.tenants.access import check_role
from app.services.tenants.usage import LONGEST

_HOUR, _FIRST = timedelta(hours=1), date(1970, 1, 1)
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
    blueprint.add_url_rule("/usage", "usage", _show_usage)
    blueprint.add_url_rule("/events", "events", _show_events)
    blueprint.add_url_rule("/runs/<run>/events", "run_events", _show_run_events)


def _show_account() -> str:
    """The key, and the limits of its projects with their use."""
    caller = current_caller()
    limits = {project: services().quotas.describe(caller, project) for project in sorted(caller.roles)}
    is_admin = any(caller.may("admin", project) for project in caller.roles)
    return render_template("account.html", key=services().own_key.describe(caller), limits=limits, is_admin=is_admin)


def _show_usage() -> str:
    """The usage and the stored checkpoints of the projects where the user is an admin. Raises Forbidden."""
    caller, end = current_caller(), _now().replace(minute=0, second=0, microsecond=0) + _HOUR
    usage = _by_day(services().usage.events(caller, end - LONGEST, end)["data"])
    runs = services().usage.runs(caller, end - LONGEST, end)
    cost = total([run["estimated_cost_usd"] for run in runs])
    stored = services().usage.stored(caller, None)
    return render_template(
        "usage.html", usage=usage, columns=_COLUMNS, runs=runs, cost=cost, stored=stored, days=LONGEST.days
    )


def _show_events() -> str:
    """The audit log of one day. Raises Forbidden, and BadRequest for a text that is no day since 1970."""
    today, asked = _now().date(), request.args.get("day")
    try:
        day = today if asked is None else date.fromisoformat(asked)
    except ValueError:
        raise BadRequest(f"{asked!r:.80} is no day: give one as {today}") from None
    if not _FIRST <= day <= today:
        raise BadRequest(f"there are no changes on {day}: give a day from {_FIRST} to {today}")
    entries = services().audit.read(current_caller(), "all", day)
    title, empty = f"Changes on {day}", "Nothing was changed on this day."
    before, after = (day + timedelta(days=days) for days in (-1, 1))
    near = {"before": before if before >= _FIRST else None, "after": after if after <= today else None}
    return render_template("events.html", title=title, empty=empty, entries=entries[::-1], **near)


def _show_run_events(run: str) -> str:
    """The audit log of a run and its checkpoints over the last days. Raises NotFound, and Forbidden for all but admins
    of its project."""
    caller, days = current_caller(), LONGEST.days
    owner = services().runs.describe_state(run, caller)["project_id"]
    check_role(caller, owner, "admin")
    found = services().audit.of([owner], "all", _now().date() - timedelta(days - 1), days)
    entries = [entry for entry in found if _is_about(entry, run)]
    title, empty = f"Changes to run {run}", f"No changes in the last {days} days."
    return render_template("events.html", title=title, empty=empty, entries=entries[::-1])


def _is_about(entry: Mapping[str, Any], run: str) -> bool:
    """True for an entry about the run, one of its checkpoints, or its session."""
    details = entry["event_details"]
    is_checkpoint = str(details.get("tinker_path", "")).startswith(checkpoint_path_prefix(run))
    return is_checkpoint or details.get("model_id") == run or details.get("session_id") == session_of(run)


def _now() -> datetime:
    return datetime.fromtimestamp(services().records.now(), UTC)


def _by_day(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, Counter[str]]]:
    """The usage of each day (UTC), project and base model, the newest day first: amounts by kind."""
    found: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for event in events:
        info = event["event_info"]
        kind = CACHED if info.get("cached") else info["type"]
        if kind in _COLUMNS.values():
            amount = info.get("token_count", info.get("count"))
            found[event["bucket_start"][:10], event["project_id"], event["base_model"]][kind] += amount
    by_project = sorted(found)
    return [(*group, found[group]) for group in sorted(by_project, key=lambda group: group[0], reverse=True)]

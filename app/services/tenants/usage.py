"""Usage, storage and cost of projects and runs. A cost is an amount at the prices that the settings have today."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from app import ids
from app.domain.accounts import Caller, User
from app.domain.prices import GB, MONTH_H, PricesOf, total
from app.domain.results import CACHED, DEVICE, HOUR_S, PREFILLED, SAMPLED, SAVED, STORED, TRAINED
from app.errors import BadRequest
from app.services.tenants.access import ListedCheckpoint, check_role, list_checkpoints, users_of
from app.services.tenants.audit import admin_projects
from app.services.views import check_seen, texts, timestamp, user_urn
from app.stores.pages import Fields, LedgerPage
from app.stores.redis.pages import Ledgers
from app.stores.redis.records import RedisRecords

LONGEST = timedelta(days=14)
_SESSION, _RUN = "session", "run"
"""Names of the fields of a page that describe a session, and that repeat the usage of a run."""
_Group = tuple[str, str, str]
"""Project, run and base model. The run is empty for usage that belongs to none."""


@dataclass(frozen=True, slots=True)
class UsageService:
    """Usage and storage reports for admins, about the projects where they are admins."""

    ledgers: Ledgers
    records: RedisRecords
    prices_of: PricesOf

    def events(self, caller: Caller, start: datetime, end: datetime) -> dict[str, Any]:
        """The SDK's BillingUsageResponse for the hours from `start` up to `end`. Usage stays with the project that had
        the run or the sampler at the time. Raises Forbidden, BadRequest, and Unavailable."""
        pages = self.ledgers.read("usage", admin_projects(caller), self._hours(start, end))
        sessions = {id_: about for fields in pages.values() for id_, about in _sessions(fields)}
        emails = self._emails({about["user"] for about in sessions.values()})
        events = [event for page, fields in pages.items() for event in self._events(page, fields, sessions, emails)]
        shown = {event["session_id"] for event in events}
        metadata = {id_: texts(about["user_metadata"]) or None for id_, about in sessions.items()}
        return {
            "data": sorted(events, key=_order),
            "sessions": {id_: {"user_metadata": metadata[id_]} for id_ in sorted(shown & metadata.keys())},
        }

    def stored(self, caller: Caller, project: str | None) -> list[dict[str, Any]]:
        """The SDK's CurrentCheckpointStorageUsageItems, by project and by the user who opened the session. Raises
        NotFound for a project that the caller does not see, and Forbidden."""
        return self._by_user(self._checkpoints(caller, project))

    def storage(self, caller: Caller, project: str | None) -> dict[str, Any]:
        """The SDK's CurrentCheckpointStorageUsageResponse, with a rate if all stored checkpoints have the same price.
        Raises NotFound and Forbidden, as `stored` does."""
        checkpoints = self._checkpoints(caller, project)
        rates = {self.prices_of(checkpoint.base_model).rate(STORED) for _, checkpoint in checkpoints}
        return {"data": self._by_user(checkpoints), **_rates(STORED, rates.pop() if len(rates) == 1 else None)}

    def _checkpoints(self, caller: Caller, project: str | None) -> list[ListedCheckpoint]:
        if project is None:
            projects = admin_projects(caller)
        else:
            check_role(caller, check_seen(caller, project), "admin")
            projects = [project]
        return list_checkpoints(self.records, set(projects))

    def _by_user(self, checkpoints: list[ListedCheckpoint]) -> list[dict[str, Any]]:
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        costs: defaultdict[tuple[str, str], list[float | None]] = defaultdict(list)
        users = users_of(self.records, {ids.session_of(checkpoint.model_id) for _, checkpoint in checkpoints})
        for _, checkpoint in checkpoints:
            group = checkpoint.owner, users[ids.session_of(checkpoint.model_id)]
            counts[group] += 1
            sizes[group] += checkpoint.size_bytes
            month = checkpoint.size_bytes * MONTH_H * HOUR_S
            costs[group].append(self.prices_of(checkpoint.base_model).cost(STORED, month))
        emails = self._emails({user for _, user in counts})
        return [
            {
                "project_id": of,
                "org_user_urn": user_urn(user) if user else None,
                "user_email": emails.get(user),
                "user_name": emails.get(user),
                "checkpoint_count": counts[of, user],
                "size_bytes": sizes[of, user],
                "size_gigabytes": sizes[of, user] / GB,
                "estimated_monthly_cost_usd": total(costs[of, user]),
            }
            for of, user in sorted(counts)
        ]

    def runs(self, caller: Caller, start: datetime, end: datetime) -> list[dict[str, Any]]:
        """The usage and cost of each run from `start` up to `end`, and the checkpoints that it has now, of the projects
        where the caller is an admin. Raises Forbidden, BadRequest, and Unavailable."""
        projects = admin_projects(caller)
        return self.by_run(projects, self._hours(start, end))

    def by_run(self, projects: Collection[str], hours: range) -> list[dict[str, Any]]:
        """The rows of `runs` for these projects and hours, the highest cost first, then the most tokens. Usage that
        belongs to no run is in rows without one: samples of a base model, storage, and usage that an earlier version
        counted. Raises Unavailable."""
        used: defaultdict[_Group, Counter[str]] = defaultdict(Counter)
        for page, fields in self.ledgers.read("usage", projects, hours).items():
            for (run, base_model), amounts in _of_runs(fields).items():
                used[page.project, run, base_model].update(amounts)
        stored: Counter[_Group] = Counter()
        for _, checkpoint in list_checkpoints(self.records, set(projects)):
            stored[checkpoint.owner, checkpoint.model_id, checkpoint.base_model] += checkpoint.size_bytes
        rows = [self._row(group, used[group], stored[group]) for group in sorted({*used, *stored})]
        return sorted(rows, key=lambda row: (-(row["estimated_cost_usd"] or 0), -row["training_tokens"]))

    def _row(self, group: _Group, amounts: Counter[str], stored: int) -> dict[str, Any]:
        (project, run, base_model), prices = group, self.prices_of(group[2])
        return {
            "project_id": project,
            "run_id": run or None,
            "base_model": base_model,
            "training_tokens": amounts[TRAINED],
            "prefill_tokens": amounts[PREFILLED],
            "cached_prefill_tokens": amounts[CACHED],
            "sampled_tokens": amounts[SAMPLED],
            "device_seconds": amounts[DEVICE] / 1000,
            "checkpoints": amounts[SAVED],
            "gigabyte_hours": amounts[STORED] / GB / HOUR_S,
            "stored_bytes": stored,
            "estimated_cost_usd": total([prices.cost(kind, amount) for kind, amount in amounts.items()]),
        }

    def _hours(self, start: datetime, end: datetime) -> range:
        """The hours of a window. Raises BadRequest."""
        hours = range(_hour(start, "starting_on"), _hour(end, "ending_before"))
        if not timedelta() < end - start <= LONGEST:
            raise BadRequest(f"ending_before must be after starting_on, by {LONGEST.days} days at most")
        if not 0 <= start.timestamp() <= self.records.now():
            raise BadRequest(f"starting_on {start.isoformat()} is in the future, or before 1970")
        return hours

    def _events(
        self, page: LedgerPage, fields: Fields, sessions: Mapping[str, dict[str, Any]], emails: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        for kind, session, base_model, amount in totals(fields):
            if kind == DEVICE:  # the SDK has no event for it
                continue
            user, rate = sessions.get(session, {}).get("user", ""), self.prices_of(base_model).rate(kind)
            yield {
                "bucket_start": timestamp(page.hour * HOUR_S),
                "bucket_end": timestamp((page.hour + 1) * HOUR_S),
                "base_model": base_model,
                "user_id": user_urn(user) if user else None,
                "user_name": emails.get(user),
                "session_id": session or None,
                "project_id": page.project,
                "estimated_cost_usd": None if rate is None else rate * amount,
                **_rates(kind, rate),
                "event_info": _info(kind, amount),
            }

    def _emails(self, users: set[str]) -> dict[str, str]:
        """Emails of the users that have an account."""
        found = {user: self.records.find(User, user) for user in users if user}
        return {id_: user.email for id_, user in found.items() if user}


def _hour(moment: datetime, name: str) -> int:
    hour, rest = divmod(moment.timestamp(), HOUR_S)
    if rest:
        raise BadRequest(f"{name} {moment.isoformat()} is not the start of an hour (UTC)")
    return int(hour)


def _sessions(fields: Fields) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, text in fields.items():
        kind, _, session = name.partition(" ")
        if kind == _SESSION:
            yield session, json.loads(text)


def totals(fields: Fields) -> Iterator[tuple[str, str, str, int]]:
    """Kind, session, base model and amount of each kind of usage on a page."""
    for name, amount in fields.items():
        kind, _, rest = name.partition(" ")
        session, _, base_model = rest.partition(" ")
        if kind not in (_SESSION, _RUN):
            yield kind, session, base_model, int(amount)


def _of_runs(fields: Fields) -> dict[tuple[str, str], Counter[str]]:
    """The amounts by kind, of each run and base model on a page; those of no run have an empty run."""
    found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for kind, _, base_model, amount in totals(fields):
        found["", base_model][kind] += amount
    for name, text in fields.items():
        if name.startswith(f"{_RUN} "):
            _, kind, run, base_model = name.split(" ", 3)
            found[run, base_model][kind] += int(text)
            found["", base_model][kind] -= int(text)
    return {group: +amounts for group, amounts in found.items() if +amounts}


def _rates(kind: str, rate: float | None) -> dict[str, float | None]:
    """The SDK's field for the price of one unit of its own."""
    if rate is None:
        return {}
    if kind == STORED:
        return {"effective_rate_usd_per_gigabyte_month": rate * GB * MONTH_H * HOUR_S}
    return {"effective_rate_usd_per_million_tokens": rate * 10**6}


def _info(kind: str, amount: int) -> dict[str, Any]:
    """The SDK's fields for each kind of usage."""
    if kind in (TRAINED, SAMPLED):
        return {"type": kind, "token_count": amount}
    if kind in (PREFILLED, CACHED):
        return {"type": PREFILLED, "cached": kind == CACHED, "token_count": amount}
    if kind == SAVED:
        return {"type": kind, "count": amount}
    return {"type": STORED, "free": False, "gigabyte_hours": amount / GB / HOUR_S}


def _order(event: dict[str, Any]) -> tuple[str, int]:
    """Sort key: by hour, then most tokens first."""
    return event["bucket_start"], -event["event_info"].get("token_count", 0)

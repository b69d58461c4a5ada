"""Usage and storage of projects: plain accounting, without prices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from app import ids
from app.domain.accounts import Caller, User
from app.domain.records import Session
from app.domain.results import CACHED, HOUR_S, PREFILLED, SAMPLED, SAVED, STORED, TRAINED
from app.errors import BadRequest
from app.services.tenants.access import check_role, list_checkpoints
from app.services.tenants.audit import admin_projects
from app.services.views import check_seen, texts, timestamp, user_urn
from app.stores.pages import Fields, Page
from app.stores.redis.pages import UsageLedger
from app.stores.redis.records import RedisRecords

LONGEST = timedelta(days=14)
_GB = 10**9
_SESSION = "session"


@dataclass(frozen=True, slots=True)
class UsageService:
    """Usage and storage reports for admins, about the projects where they are admins."""

    ledger: UsageLedger
    records: RedisRecords

    def events(self, caller: Caller, start: datetime, end: datetime) -> dict[str, Any]:
        """The SDK's BillingUsageResponse for the hours from `start` up to `end`. Usage stays with the project that had
        the run or the sampler at the time. Raises Forbidden, BadRequest, and Unavailable."""
        hours = range(_hour(start, "starting_on"), _hour(end, "ending_before"))
        if not timedelta() < end - start <= LONGEST:
            raise BadRequest(f"ending_before must be after starting_on, by {LONGEST.days} days at most")
        if not 0 <= start.timestamp() <= self.records.now():
            raise BadRequest(f"starting_on {start.isoformat()} is in the future, or before 1970")
        pages = self.ledger.read("usage", admin_projects(caller), hours)
        sessions = {id_: about for fields in pages.values() for id_, about in _sessions(fields)}
        emails = self._emails({about["user"] for about in sessions.values()})
        events = [event for page, fields in pages.items() for event in _events(page, fields, sessions, emails)]
        shown = {event["session_id"] for event in events}
        metadata = {id_: texts(about["user_metadata"]) or None for id_, about in sessions.items()}
        return {
            "data": sorted(events, key=_order),
            "sessions": {id_: {"user_metadata": metadata[id_]} for id_ in sorted(shown & metadata.keys())},
        }

    def stored(self, caller: Caller, project: str | None) -> list[dict[str, Any]]:
        """The SDK's CurrentCheckpointStorageUsageItems, by project and by the user who opened the session. Raises
        NotFound for a project that the caller does not see, and Forbidden."""
        if project is None:
            projects = admin_projects(caller)
        else:
            check_role(caller, check_seen(caller, project), "admin")
            projects = [project]
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        checkpoints = list_checkpoints(self.records, set(projects))
        sessions = sorted({ids.session_of(checkpoint.model_id) for _, checkpoint in checkpoints})
        found = self.records.read(Session.namespace, sessions)
        users = {id_: json.loads(fields.get("user", '""')) for id_, fields in found}
        for _, checkpoint in checkpoints:
            group = checkpoint.owner, users.get(ids.session_of(checkpoint.model_id), "")
            counts[group] += 1
            sizes[group] += checkpoint.size_bytes
        emails = self._emails({user for _, user in counts})
        return [
            {
                "project_id": of,
                "org_user_urn": user_urn(user) if user else None,
                "user_email": emails.get(user),
                "checkpoint_count": counts[of, user],
                "size_bytes": sizes[of, user],
                "size_gigabytes": sizes[of, user] / _GB,
            }
            for of, user in sorted(counts)
        ]

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


def _events(
    page: Page, fields: Fields, sessions: Mapping[str, dict[str, Any]], emails: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for name, amount in fields.items():
        kind, session, base_model = (*name.split(" ", 2), "")[:3]
        if kind == _SESSION:
            continue
        user = sessions.get(session, {}).get("user", "")
        yield {
            "bucket_start": timestamp(page.hour * HOUR_S),
            "bucket_end": timestamp((page.hour + 1) * HOUR_S),
            "base_model": base_model,
            "user_id": user_urn(user) if user else None,
            "user_name": emails.get(user),
            "session_id": session or None,
            "project_id": page.project,
            "event_info": _info(kind, int(amount)),
        }


def _info(kind: str, amount: int) -> dict[str, Any]:
    """The SDK's fields for each kind of usage."""
    if kind in (TRAINED, SAMPLED):
        return {"type": kind, "token_count": amount}
    if kind in (PREFILLED, CACHED):
        return {"type": PREFILLED, "cached": kind == CACHED, "token_count": amount}
    if kind == SAVED:
        return {"type": kind, "count": amount}
    return {"type": STORED, "free": False, "gigabyte_hours": amount / _GB / HOUR_S}


def _order(event: dict[str, Any]) -> tuple[str, int]:
    """Sort key: by hour, then most tokens first."""
    return event["bucket_start"], -event["event_info"].get("token_count", 0)

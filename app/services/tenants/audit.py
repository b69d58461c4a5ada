"""Audit log of changes to persistent resources: runs, checkpoints, moved sessions, projects, users and keys.

An entry is written after a call is authorised and before it takes effect. The entry of a journaled call is written in
the step that admits the call. Nothing takes effect without an entry. Entries hold ids and settings, never contents.
Event names have the form `<resource>_<action>`.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal

from app.domain.accounts import Caller
from app.domain.results import HOUR_S
from app.errors import Forbidden
from app.services.views import timestamp, user_urn
from app.stores.redis.pages import Ledgers
from app.stores.redis.records import RedisRecords

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
About = Mapping[str, str | float | None]
"""The resource and the settings of an event, by name."""
OPERATOR = "operator"
"""The actor of events that come from the server's command line."""
_RESOURCES: dict[EventType, tuple[str, ...]] = {
    "checkpoints": ("checkpoint", "run"),
    "projects": ("project", "session", "capture"),
    "teams": ("user", "key"),
    "organizations": ("organization",),
}
_DAY_H = 24


def note(
    records: RedisRecords,
    by: Caller | None,
    scope: str,
    event: str,
    about: About,
    *,
    once: str = "",
    urgent: bool = False,
) -> None:
    """Writes an audit entry of a project or of an organisation. `by` is None for the operator. Calls with the same
    `once` value get one entry, however often they are repeated within the hour, as long as their content is the same; a
    call that was refused for now may be repeated with other content. Raises Unavailable while there is no room, unless
    `urgent`, as for a call that deletes or revokes."""
    text = entry(by, scope, event, about)
    key = f"{once} {hashlib.sha256(text.encode()).hexdigest()}" if once else uuid.uuid4().hex
    records.note("audit", scope, key, text, urgent=urgent)


def entry(by: Caller | None, scope: str, event: str, about: About) -> str:
    """The text of an entry; arguments as in `note`."""
    who = {"user_id": OPERATOR} if by is None else {"user_id": user_urn(by.user), "key_id": by.key_id}
    return json.dumps({"event": event, "event_details": {**who, "project_id": scope, **about}})


@dataclass(frozen=True, slots=True)
class AuditService:
    """Reads the audit log for admins."""

    ledgers: Ledgers
    records: RedisRecords

    def read(self, caller: Caller, event_type: EventType, day: date | None) -> list[dict[str, Any]]:
        """The entries of a day (UTC; None: today by the state server's clock) for the projects where the caller is an
        admin, oldest first. Raises Forbidden if the caller is an admin of no project, and Unavailable."""
        asked = datetime.fromtimestamp(self.records.now(), UTC).date() if day is None else day
        return self.of(admin_projects(caller), event_type, asked)

    def of(self, scopes: list[str], event_type: EventType, day: date, days: int = 1) -> list[dict[str, Any]]:
        """The same entries for any projects and organisations, of so many days from `day` on."""
        first = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) // HOUR_S
        pages = self.ledgers.read("audit", scopes, range(first, first + days * _DAY_H))
        found = sorted((_parsed(text) for fields in pages.values() for text in fields.values()), key=lambda one: one[0])
        return [_view(ms, entry) for ms, entry in found if _is_of(entry["event"], event_type)]


def admin_projects(caller: Caller) -> list[str]:
    """The projects where the caller is an admin. Raises Forbidden if there is none."""
    found = [project for project in caller.roles if caller.may("admin", project)]
    if not found:
        raise Forbidden("this needs the role admin in a project, and you have it in none")
    return found


def _is_of(event: str, asked: EventType) -> bool:
    return asked == "all" or event.startswith(tuple(f"{resource}_" for resource in _RESOURCES[asked]))


def _parsed(text: str) -> tuple[int, dict[str, Any]]:
    ms, _, entry = text.partition(" ")
    return int(ms), json.loads(entry)


def _view(ms: int, entry: dict[str, Any]) -> dict[str, Any]:
    """The SDK's AuditLogEntry, with the two fields that older SDKs read."""
    details = entry["event_details"]
    older = {name: details[name] for name in ("model_id", "tinker_path") if name in details}
    return {"timestamp": timestamp(ms / 1000), **entry, **older}

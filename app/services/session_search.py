"""Finding sessions by what was said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Checkpoint, Session
from app.services.lists import check_seen, projects
from app.services.views import texts, timestamp
from app.stores.interfaces import Records

Found = tuple[str, Session]
_REASONS = ("success", "errored", "interrupted")


class SessionSearch:
    """Newest first, a page at a time; a page goes on right behind the last session of the one before."""

    def __init__(self, store: Records) -> None:
        self._records = store

    def __call__(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The body of sessions/search. Raises NotFound for a project the caller does not see."""
        fits = _filter(caller, asked)
        stored = ((id_, records.load(Session, fields)) for id_, fields in self._records.list(Session.namespace))
        found = sorted((pair for pair in stored if fits(pair)), key=_place, reverse=True)
        shown = found[: asked["limit"]]
        answer: dict[str, Any] = {"sessions": [self._summary(pair) for pair in shown]}
        if len(found) > len(shown):
            last_id, last = shown[-1]
            answer["next_cursor"] = {"last_created_at": timestamp(last.created), "last_session_id": last_id}
        return answer

    def _summary(self, found: Found) -> dict[str, Any]:
        session_id, session = found
        stored = self._records.list(Checkpoint.namespace, f"tinker://{ids.model_prefix(session_id)}")
        sizes = [records.load(Checkpoint, fields).size_bytes for _, fields in stored]
        return {
            "session_id": session_id,
            "created_at": timestamp(session.created),
            "owner": session.owner,
            "project_id": session.owner,
            "status": _status(session),
            "checkpoints_count": len(sizes),
            "checkpoint_storage_bytes": sum(sizes),
            "display_name": session.display_name or None,
            "user_metadata": texts(session.user_metadata),
        }


def _filter(caller: Caller, asked: Mapping[str, Any]) -> Callable[[Found], bool]:
    owner = asked["owner"]
    within = projects(caller, "owned" if owner["type"] == "own" else "accessible")
    if asked["project_ids"] is not None:
        within &= {check_seen(caller, project) for project in asked["project_ids"]}
    if owner["type"] == "user":
        within &= set(owner["owner_urns"])
    wanted = asked["user_metadata"].items()

    def fits(found: Found) -> bool:
        session = found[1]
        return (
            session.owner in within
            and _is_named(found, asked["session_id"], asked["display_name"])
            and wanted <= texts(session.user_metadata).items()
            and _has_status(session, asked["statuses"])
            and (asked["cursor"] is None or _place(found) < _after(asked["cursor"]))
        )

    return fits


def _is_named(found: Found, session_id: str | None, name: str | None) -> bool:
    """By its id or by each of the words of its name; anything fits where neither is asked for."""
    if session_id is None and name is None:
        return True
    called = found[1].display_name.casefold()
    return found[0] == session_id or (name is not None and all(word in called for word in name.casefold().split()))


def _has_status(session: Session, statuses: list[dict[str, Any]] | None) -> bool:
    if statuses is None:
        return True
    kind = (_status(session) or {}).get("type")
    return any(
        asked["type"] == kind and (asked["reasons"] is None or session.status in asked["reasons"]) for asked in statuses
    )


def _status(session: Session) -> dict[str, Any] | None:
    """None for one that nobody has heard of for long, and did not finish."""
    if session.status == "open":
        return {"type": "active"}
    return {"type": "client_finished", "reason": {"type": session.status}} if session.status in _REASONS else None


def _place(found: Found) -> tuple[datetime, str]:
    return datetime.fromtimestamp(found[1].created, UTC), found[0]


def _after(cursor: Mapping[str, Any]) -> tuple[datetime, str]:
    return cursor["last_created_at"], cursor["last_session_id"]

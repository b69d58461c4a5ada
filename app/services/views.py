"""Client-facing forms of stored data: views of records, and pages of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Checkpoint
from app.errors import NotFound

CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

AccessScope = Literal["owned", "accessible"]
"""The projects of a list: those where the caller may work, or also those that the caller may only view."""
T = TypeVar("T")


def checkpoint_view(path: str, found: Checkpoint) -> dict[str, Any]:
    """A checkpoint in the form of the SDK's Checkpoint."""
    fields: Mapping[str, Any] = {
        "checkpoint_id": ids.TinkerPath.parse(path).checkpoint_id,
        "checkpoint_type": CHECKPOINT_TYPES[found.kind],
        "time": timestamp(found.created),
        "tinker_path": path,
        "size_bytes": found.size_bytes,
        "public": found.public,
        "user_metadata": found.user_metadata or None,
        "base_model": found.base_model,
        "expires_at": None if found.expires_at is None else timestamp(found.expires_at),
    }
    return {key: value for key, value in fields.items() if value is not None}


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The metadata with every value as text: the SDK reads only texts, although its user may store any value."""
    return {key: str(value) for key, value in metadata.items()}


def timestamp(unix: float) -> str:
    """ISO 8601 with a time zone, to the microsecond."""
    return datetime.fromtimestamp(unix, UTC).isoformat()


def day_text(unix: float) -> str:
    """The day (UTC) of a time, for people."""
    return datetime.fromtimestamp(unix, UTC).date().isoformat()


def size_text(count: float | None) -> str:
    """A number of bytes, for people."""
    size = float(count or 0)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def user_urn(user: str) -> str:
    """A user's name in the SDK's form."""
    return f"tml:organization_user:{user}"


def owner_of(user: str, project: str) -> str:
    """The owner of a session or run: the user who opened or created it, or the project if that user is unknown."""
    return user_urn(user) if user else project


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list: `limit` items from index `offset` on."""

    offset: int
    limit: int

    def of(self, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """The slice, and a cursor with the total number of items."""
        cursor = {"offset": self.offset, "limit": self.limit, "total_count": len(items)}
        return items[self.offset : self.offset + self.limit], cursor


def projects(caller: Caller, scope: AccessScope, only: str | None = None) -> Set[str]:
    """The projects to list from: those where the caller may work, or with "accessible" also those that the caller may
    only view; or only the named one. Raises NotFound for a project that the caller does not see."""
    if only is not None:
        return {check_seen(caller, only)}
    return {project for project in caller.roles if scope == "accessible" or caller.may("member", project)}


def searched(caller: Caller, owner: Mapping[str, Any], only: Sequence[str] | None) -> Set[str]:
    """The projects to search for the `owner` of the request, or only the named ones of these. Raises NotFound for a
    named project that the caller does not see."""
    within = projects(caller, "owned" if owner["type"] == "own" else "accessible")
    if only is not None:
        within &= {check_seen(caller, project) for project in only}
    return within


def is_wanted(caller: Caller, owner: Mapping[str, Any], user: str, project: str) -> bool:
    """True if the `owner` of a search includes the session of this user in this project. If nobody knows who opened a
    session, it counts as an own session of each member of the project."""
    if owner["type"] == "own":
        return user in ("", caller.user)
    earlier = {f"tml:user:{user}"} if user else set()  # the URN in earlier versions
    names = {owner_of(user, project), project} | earlier
    return owner["type"] == "accessible" or not names.isdisjoint(owner["owner_urns"])


def check_seen(caller: Caller, project: str) -> str:
    """The project. Raises NotFound if the caller does not see it, whether it exists or not."""
    if not caller.sees(project):
        raise no_project(project)
    return project


def check_writable(caller: Caller, project: str) -> str:
    """The project. Raises NotFound if the caller may not write to it, whether it exists or not."""
    if not caller.may("member", project):
        raise no_project(project)
    return project


def no_project(project: str) -> NotFound:
    return NotFound(f"project {project[:200]!r} does not exist")

"""The form in which stored things reach clients: views of records, and slices of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Checkpoint
from app.errors import NotFound

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

Scope = Literal["owned", "accessible"]
T = TypeVar("T")


def checkpoint_view(path: str, found: Checkpoint) -> dict[str, Any]:
    """The SDK's Checkpoint."""
    fields: Mapping[str, Any] = {
        "checkpoint_id": ids.TinkerPath.parse(path).checkpoint_id,
        "checkpoint_type": _TYPES[found.kind],
        "time": timestamp(found.created),
        "tinker_path": path,
        "size_bytes": found.size_bytes,
        "public": found.public,
        "user_metadata": found.user_metadata or None,
        "expires_at": None if found.expires_at is None else timestamp(found.expires_at),
    }
    return {key: value for key, value in fields.items() if value is not None}


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The SDK reads nothing but texts where it let its user write anything."""
    return {key: str(value) for key, value in metadata.items()}


def timestamp(unix: float) -> str:
    """ISO 8601 with its zone, to the microsecond."""
    return datetime.fromtimestamp(unix, UTC).isoformat()


def user_urn(user: str) -> str:
    """A user as the SDK names him."""
    return f"tml:user:{user}"


@dataclass(frozen=True, slots=True)
class Page:
    """`limit` items from the `offset`-th on."""

    offset: int
    limit: int

    def of(self, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """The slice, and the cursor that tells how many there are in all."""
        cursor = {"offset": self.offset, "limit": self.limit, "total_count": len(items)}
        return items[self.offset : self.offset + self.limit], cursor


def projects(caller: Caller, scope: Scope, only: str | None = None) -> Set[str]:
    """Those whose things are listed: where the caller may work, or ("accessible") also where he may only look; or the
    one that he names. Raises NotFound for one he does not see."""
    if only is not None:
        return {check_seen(caller, only)}
    return {project for project in caller.roles if scope == "accessible" or caller.may("member", project)}


def check_seen(caller: Caller, project: str) -> str:
    """The project. Raises NotFound where the caller does not see it, whether it exists or not."""
    if not caller.sees(project):
        raise no_project(project)
    return project


def check_writable(caller: Caller, project: str) -> str:
    """The project. Raises NotFound where the caller may put nothing, whether it exists or not."""
    if not caller.may("member", project):
        raise no_project(project)
    return project


def no_project(project: str) -> NotFound:
    return NotFound(f"project {project[:200]!r} does not exist")

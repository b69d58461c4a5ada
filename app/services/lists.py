"""What a list is of, and which slice of it is asked for."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeVar

from app.domain.identity import Caller
from app.errors import NotFound

Scope = Literal["owned", "accessible"]
T = TypeVar("T")


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

"""Who calls, and what he may do where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Role = Literal["viewer", "member", "admin"]
"""What a user is in a project; each may do all that the ones before it may. Viewers only read."""

Scope = Literal["train", "sample", "manage"]
"""What a key may change: runs and what they save; samples; what is there already. Every key may read."""

ROLES: tuple[Role, ...] = get_args(Role)
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))


@dataclass(frozen=True, slots=True)
class Caller:
    """The key of a request, and whose it is.

    `roles` are those in every project it may use, by project id; a record's `owner` is one of these ids. What does not
    say which project it is for goes to `project`. `token_ends`: when the token ends (unix s) that he showed in the
    key's place.
    """

    key_id: str
    user: str
    organisation: str
    project: str
    roles: Mapping[str, Role]
    scopes: frozenset[Scope] = SCOPES
    token_ends: int | None = field(default=None, compare=False)

    @classmethod
    def alone(cls, project: str) -> Caller:
        """A key that is a project of its own, with nobody else in it."""
        return cls(project, project, project, project, {project: "admin"})

    def sees(self, project: str) -> bool:
        """Whether he is in it at all."""
        return project in self.roles

    def may(self, role: Role, project: str) -> bool:
        """Whether he may do there what takes `role`."""
        return self.sees(project) and ROLES.index(self.roles[project]) >= ROLES.index(role)

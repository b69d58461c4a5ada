"""Accounts, callers and roles: organisations, their projects and users, and the keys of users.

Accounts: organisations, their projects and users, and the keys of users.

Every account is at home in the object store, a new version at each change, and copied to the state server, where
requests look it up. `version` counts from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

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


@dataclass(frozen=True, slots=True)
class Organisation:
    """Whoever has projects and users of its own."""

    namespace: ClassVar[str] = "organisations"
    id: str
    name: str
    created: float
    version: int = 1


@dataclass(frozen=True, slots=True)
class Project:
    """What owns sessions, runs and checkpoints. `limits` hold in place of the settings' (app/domain/limits.py)."""

    namespace: ClassVar[str] = "projects"
    id: str
    organisation: str
    name: str
    created: float
    version: int = 1
    limits: dict[str, int | float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class User:
    """Of one organisation. `roles` are those in its projects, by project id; no key of a `removed` one works."""

    namespace: ClassVar[str] = "users"
    id: str
    organisation: str
    email: str
    created: float
    roles: dict[str, Role] = field(default_factory=dict)
    removed: bool = False
    version: int = 1


@dataclass(frozen=True, slots=True)
class Key:
    """An API key of a user. `digest` is the sha256 of its secret half, which nobody keeps; `project` is where its calls
    go that do not say which. `limits` hold beside its project's. Times are unix seconds."""

    namespace: ClassVar[str] = "keys"
    id: str
    user: str
    project: str
    digest: str
    scopes: list[Scope]
    name: str
    note: str
    created: float
    expires_at: float | None = None
    revoked_at: float | None = None
    version: int = 1
    limits: dict[str, int | float | None] = field(default_factory=dict)


Account = Organisation | Project | User | Key


ACCOUNTS: tuple[type[Account], ...] = (Organisation, Project, User, Key)

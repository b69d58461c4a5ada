"""Accounts, callers and roles. Accounts are organisations, their projects and users, and the keys of users.

The object store holds every account, with a new version at each change. Each account is copied to the state server,
where requests look it up. `version` counts from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

Role = Literal["viewer", "member", "admin"]
"""A user's role in a project. Each role includes the rights of the roles before it. Viewers only read."""
Scope = Literal["train", "sample", "manage"]
"""The changes that a key may make. train: runs and their checkpoints; sample: sampling requests; manage: existing
resources. Every key may read."""
ROLES: tuple[Role, ...] = get_args(Role)
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
_WAITING: frozenset[Scope] = frozenset(("train", "sample"))
"""The scopes of the calls that have futures."""
KEY_PREFIX = "tml-"
"""The beginning of every API key. The SDK refuses a key without it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The key of a request and its user.

    `roles` maps the id of every project that the key may use to the role there; a record's `owner` is one of these ids.
    A call that names no project goes to `project`. `token_ends`: the end (unix s) of the token that the caller sent in
    place of the key. An operator administers every project's accounts, and sees nothing else of other projects.
    """

    key_id: str
    user: str
    organisation: str
    project: str
    roles: Mapping[str, Role]
    scopes: frozenset[Scope] = SCOPES
    token_ends: int | None = field(default=None, compare=False)
    is_operator: bool = False

    @classmethod
    def alone(cls, project: str, *, is_operator: bool = False) -> Caller:
        """A caller with a project of its own that has no other users."""
        return cls(project, project, project, project, {project: "admin"}, is_operator=is_operator)

    def sees(self, project: str) -> bool:
        """True when the caller has any role in the project."""
        return project in self.roles

    def may(self, role: Role, project: str) -> bool:
        """True when the caller may do in the project what requires `role`."""
        return self.sees(project) and ROLES.index(self.roles[project]) >= ROLES.index(role)

    def takes_results(self, project: str) -> bool:
        """True when the caller may be the client that waits for the project's results. A viewer, and a key that neither
        trains nor samples, only looks at them."""
        return self.may("member", project) and not self.scopes.isdisjoint(_WAITING)


@dataclass(frozen=True, slots=True)
class Organisation:
    """An organisation. It has its own projects and users."""

    namespace: ClassVar[str] = "organisations"
    id: str
    name: str
    created: float
    version: int = 1


@dataclass(frozen=True, slots=True)
class Project:
    """A project. It owns sessions, runs and checkpoints. `limits` replace those of the settings
    (app/domain/limits.py)."""

    namespace: ClassVar[str] = "projects"
    id: str
    organisation: str
    name: str
    created: float
    version: int = 1
    limits: dict[str, int | float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class User:
    """A user of one organisation. `roles` maps the ids of its projects to the user's roles. No key of a `removed` user
    works."""

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
    """An API key of a user. `digest` is the sha256 of its secret half, which is not stored. `project` is the project of
    calls that name none; with `only_project` the key works in no other one. `limits` apply in addition to the
    project's. Times are unix seconds."""

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
    only_project: bool = False

    def roles(self, user: User) -> dict[str, Role]:
        """The roles of the key's user where the key works."""
        return {id_: role for id_, role in user.roles.items() if not self.only_project or id_ == self.project}


Account = Organisation | Project | User | Key
ACCOUNTS: tuple[type[Account], ...] = (Organisation, Project, User, Key)

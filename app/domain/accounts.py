"""Accounts: organisations, their projects and users, and the keys of users.

Every account is at home in the object store, a new version at each change, and copied to the state server, where
requests look it up. `version` counts from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from app.domain.identity import Role, Scope


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

"""Administration of accounts by callers: the operator for all projects, and a project's admins for their own project.

The operator creates organisations, projects and users, and sets every limit. An admin gives roles to users of the
project's organisation, makes and revokes keys that work in this project alone, and sets how long checkpoints are kept.
An admin makes no key for other projects of a user, also not for one that the user joins later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from app.domain.accounts import Caller, Key, Organisation, Project, Role, Scope, User
from app.domain.limits import NAMES, RETENTION, Changes
from app.errors import BadRequest, Forbidden, NotFound
from app.services.tenants.access import check_role
from app.services.tenants.accounts import AccountService
from app.services.views import check_seen, no_project
from app.stores.redis.records import RedisRecords


@dataclass(frozen=True, slots=True)
class Administered:
    """A project with the accounts that belong to it. `members`: its users with their roles, by email. `keys`: the keys
    with this project as their own, the newest first, without revoked ones. `changeable`: the limits that the caller may
    set."""

    project: Project
    organisation: str
    members: list[tuple[User, Role]]
    keys: list[tuple[Key, User]]
    changeable: Set[str]


class Administration:
    """Shows and changes accounts for a caller. Every method raises Unavailable while a store is away, NotFound for a
    project that the caller does not see, and Forbidden for what the caller may not do. `recover` restores the accounts
    after the state server was emptied."""

    def __init__(self, accounts: AccountService, records: RedisRecords, recover: Callable[[], bool]) -> None:
        self._accounts, self._records, self._recover = accounts, records, recover

    def projects(self, caller: Caller) -> list[Project]:
        """The projects that the caller administers, oldest first."""
        self._recover()
        found = self._accounts.all(Project)
        return [project for project in found if caller.is_operator or caller.may("admin", project.id)]

    def organisations(self, caller: Caller) -> list[Organisation]:
        """The organisations in which the caller may create projects, oldest first."""
        return self._accounts.all(Organisation) if caller.is_operator else []

    def describe(self, caller: Caller, project: str) -> Administered:
        """The project with its members and keys."""
        found = self._administered(caller, project)
        organisation = self._records.find(Organisation, found.organisation)
        users = {user.id: user for user in self._accounts.all(User) if not user.removed}
        members = [(user, user.roles[project]) for user in users.values() if project in user.roles]
        keys = [
            (key, users[key.user])
            for key in self._accounts.all(Key)
            if key.project == project and key.user in users and key.revoked_at is None
        ]
        return Administered(
            found,
            organisation.name if organisation else found.organisation,
            sorted(members, key=lambda member: member[0].email),
            keys[::-1],
            frozenset(NAMES if caller.is_operator else RETENTION),
        )

    def add_organisation(self, caller: Caller, name: str) -> Organisation:
        _check_operator(caller)
        return self._accounts.add_organisation(name, by=caller)

    def add_project(self, caller: Caller, organisation: str, name: str) -> Project:
        """Raises NotFound also for the organisation."""
        _check_operator(caller)
        return self._accounts.add_project(organisation, name, by=caller)

    def add_member(self, caller: Caller, project: str, email: str, role: Role) -> None:
        """Gives a role to the user with this email in the project's organisation. An operator creates the user if there
        is none; an admin may not, as the operator could later give that user other projects. Raises BadRequest for an
        email that several users have."""
        organisation = self._administered(caller, project).organisation
        found = [user for user in self._users(organisation) if user.email.casefold() == email.casefold()]
        if len(found) > 1:
            raise BadRequest(f"{len(found)} users have the email {email[:200]!r}: use `tinsmith admin user role`")
        if not found and not caller.is_operator:
            raise NotFound(
                f"no user of this organisation has the email {email[:200]!r}: ask the operator to create one"
            )
        user = found[0] if found else self._accounts.add_user(organisation, email, by=caller)
        self._accounts.set_role(user.id, project, role, by=caller)

    def set_role(self, caller: Caller, project: str, user: str, role: Role | None) -> None:
        """Changes the role of a member; None removes the member from the project. Raises NotFound for a user that is no
        member."""
        self._administered(caller, project)
        self._check_member(project, user)
        self._accounts.set_role(user, project, role, by=caller)

    def add_key(
        self, caller: Caller, project: str, user: str, scopes: Iterable[Scope], name: str, lifetime_s: float | None
    ) -> tuple[Key, str]:
        """Creates a key of a member that works in this project alone. Returns it with its text, which is never shown
        again. The key has no more scopes than the caller's own, and expires no later. It stays valid when the
        caller's key is revoked, and when the caller leaves the project. Raises NotFound for a user that is no member,
        and BadRequest for a wrong name."""
        self._administered(caller, project)
        self._check_member(project, user)
        wanted = frozenset(scopes)
        if beyond := sorted(wanted - caller.scopes):
            raise Forbidden(f"your key does not have the scope {beyond[0]}, so it makes no key that has it")
        own = self._records.find(Key, caller.key_id)
        ends = None if lifetime_s is None else self._records.now() + lifetime_s
        if own is not None and own.expires_at is not None and (ends is None or ends > own.expires_at):
            raise Forbidden("your key expires before this one would: give fewer days")
        return self._accounts.add_key(
            user, project, wanted, name=name, lifetime_s=lifetime_s, only_project=True, by=caller
        )

    def key(self, caller: Caller, project: str, key: str) -> Key:
        """A key of the project that the caller may revoke. Raises NotFound, and Forbidden for a key that works in other
        projects too. Only the operator and its user revoke it, and the user only with such a key: an admin can make a
        key that acts for this user in this project alone."""
        self._administered(caller, project)
        found = self._records.find(Key, key)
        if found is None or found.project != project:
            raise NotFound(f"key {key[:200]!r} does not exist in project {project}")
        if not (caller.is_operator or found.only_project or self._is_own(found, caller)):
            raise Forbidden(
                "this key works in other projects of its user too: only the user, with a key that does so too, and the "
                "operator revoke it"
            )
        return found

    def revoke(self, caller: Caller, project: str, key: str) -> None:
        """Revokes a key of the project. Raises as `key` does. A repeat is harmless."""
        self._accounts.revoke(self.key(caller, project, key).id, by=caller)

    def set_limits(self, caller: Caller, project: str, limits: Changes, default: Iterable[str]) -> None:
        """Sets limits of the project; those named in `default` return to the settings'. An admin sets only those that
        delete old checkpoints: the other ones protect other projects. Raises BadRequest."""
        self._administered(caller, project)
        given_up = frozenset(default)
        if not caller.is_operator and (beyond := sorted((limits.keys() | given_up) - set(RETENTION))):
            raise Forbidden(f"only the operator sets {beyond[0]}; an admin sets {' and '.join(RETENTION)}")
        self._accounts.set_limits(project, limits, default=given_up, by=caller)

    def _administered(self, caller: Caller, project: str) -> Project:
        self._recover()
        if not caller.is_operator:
            check_role(caller, check_seen(caller, project), "admin")
        found = self._records.find(Project, project)
        if found is None:
            raise no_project(project)
        return found

    def _check_member(self, project: str, user: str) -> None:
        found = self._records.find(User, user)
        if found is None or found.removed or project not in found.roles:
            raise NotFound(f"user {user[:200]!r} is not in project {project}")

    def _is_own(self, key: Key, caller: Caller) -> bool:
        """True for a key of the caller's user, if the caller's own key works in all projects of this user."""
        own = self._records.find(Key, caller.key_id)
        return own is not None and own.user == key.user and not own.only_project

    def _users(self, organisation: str) -> list[User]:
        return [user for user in self._accounts.all(User) if user.organisation == organisation and not user.removed]


def _check_operator(caller: Caller) -> None:
    if not caller.is_operator:
        raise Forbidden(
            "only the operator creates organisations and projects: this key is not in operator_keys of the settings"
        )

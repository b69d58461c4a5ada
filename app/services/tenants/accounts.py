"""Accounts: organisations, projects, users and keys, and their recovery after the state server was emptied.

A change is written to the object store first and to the state server second, so it is stored before it can be used. The
exception is a change that takes away a key, or all keys of a user. It is written to the state server first, so it works
at once, even while the object store is away. In that case the call fails and must be repeated.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from app.domain.accounts import KEY_PREFIX, Account, Caller, Key, Organisation, Project, Role, Scope, User
from app.domain.limits import OF_PROJECTS, Changes, Limits
from app.errors import BadRequest, Unavailable
from app.services.tenants import audit
from app.services.views import user_urn
from app.settings import hash_key
from app.stores.objects.accounts import AccountFiles
from app.stores.redis.records import RedisRecords, dump, load

log = logging.getLogger(__name__)
_SECRET_BYTES = 32
_ID_BYTES = 6
# Each lost race means that another change succeeded.
_TRIES = 10
_PROJECT = "project-"
L = TypeVar("L", Project, Key)
A = TypeVar("A", Organisation, Project, User, Key)

_NOTE = ("recalled", "accounts")
"""Namespace and key of the note that says whether the state server has the accounts."""
_RETRY_S = 5.0


class AccountService:
    """Creates and changes accounts. `by` is the caller that the audit log names, or None for the command line. Every
    method raises Unavailable while a store is away."""

    def __init__(self, files: AccountFiles, records: RedisRecords) -> None:
        self._files, self._records = files, records

    def add_organisation(self, name: str, by: Caller | None = None) -> Organisation:
        organisation = Organisation(_new_id("org-"), _named(name), self._records.now())
        audit.note(self._records, by, organisation.id, "organization_create", {})
        return self._added(organisation)

    def add_project(self, organisation: str, name: str, by: Caller | None = None) -> Project:
        """Creates a project. Raises NotFound for the organisation."""
        self._files.newest(Organisation, organisation)
        project = Project(_new_id(_PROJECT), organisation, _named(name), self._records.now())
        for scope in (organisation, project.id):
            audit.note(self._records, by, scope, "project_create", {"subject": project.id})
        return self._added(project)

    def add_user(self, organisation: str, email: str, by: Caller | None = None) -> User:
        """Creates a user without any project. Raises NotFound for the organisation."""
        self._files.newest(Organisation, organisation)
        user = User(_new_id("user-"), organisation, _named(email), self._records.now())
        audit.note(self._records, by, organisation, "user_create", {"subject": user_urn(user.id)})
        return self._added(user)

    def user(self, user: str) -> User:
        """The user's account. Raises NotFound."""
        return self._files.newest(User, user)

    def set_role(self, user: str, project: str, role: Role | None, by: Caller | None = None) -> User:
        """Sets a user's role in a project; None removes the user from it. Raises NotFound (user, project), or
        BadRequest for another organisation's project."""
        organisation = self._files.newest(Project, project).organisation
        if self._files.newest(User, user).organisation != organisation:
            raise BadRequest(f"project {project} belongs to organisation {organisation}, and user {user} does not")

        audit.note(self._records, by, project, "project_role_set", {"subject": user_urn(user), "role": role})

        def changed(was: User) -> User:
            others = {id_: had for id_, had in was.roles.items() if id_ != project}
            return replace(was, roles={**others, project: role} if role else others)

        return self._changed(User, user, changed)

    def remove_user(self, user: str) -> User:
        """Removes a user, so that none of the user's keys works any more. Raises NotFound. A repeat is harmless."""
        known = self._known(User, user)
        for scope in (known.organisation, *known.roles):
            audit.note(self._records, None, scope, "user_remove", {"subject": user_urn(user)}, urgent=True)
        self._records.update(User.namespace, user, {"removed": json.dumps(True)})
        return self._changed(User, user, lambda was: replace(was, removed=True))

    def add_key(
        self,
        user: str,
        project: str,
        scopes: Iterable[Scope],
        *,
        name: str = "",
        note: str = "",
        lifetime_s: float | None = None,
        only_project: bool = False,
        by: Caller | None = None,
    ) -> tuple[Key, str]:
        """Creates a key, and returns it with its text, which is never shown again. Raises NotFound (user), or
        BadRequest if the user is not in the project or was removed."""
        holder = self._files.newest(User, user)
        if holder.removed or project not in holder.roles:
            raise BadRequest(f"user {user} is not in project {project}: give the user a role there first")
        id_, secret, now = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES), self._records.now()
        expires_at = None if lifetime_s is None else now + lifetime_s
        digest = hash_key(secret)
        key = Key(id_, user, project, digest, sorted(scopes), name, note, now, expires_at, only_project=only_project)
        audit.note(self._records, by, project, "key_create", {"subject": user_urn(user), "subject_key_id": id_})
        return self._added(key), f"{KEY_PREFIX}{id_}.{secret}"

    def revoke(self, key: str, by: Caller | None = None) -> Key:
        """Revokes a key. Raises NotFound. A repeat is harmless."""
        known, now = self._known(Key, key), self._records.now()
        about = {"subject": user_urn(known.user), "subject_key_id": key}
        audit.note(self._records, by, known.project, "key_revoke", about, urgent=True)
        self._records.update(Key.namespace, key, {"revoked_at": json.dumps(now)})
        return self._changed(Key, key, lambda was: replace(was, revoked_at=now))

    def set_limits(
        self, id_: str, limits: Changes, *, default: Iterable[str] = (), by: Caller | None = None
    ) -> Project | Key:
        """Sets limits of a project or a key; the limits named in `default` return to those of the settings. Raises
        NotFound or BadRequest."""
        given_up = frozenset(default)
        if id_.startswith(_PROJECT):
            return self._limited(Project, id_, limits, given_up, by)
        key = self._known(Key, id_)
        if wrong := [name for name in OF_PROJECTS if limits.get(name) is not None]:
            raise BadRequest(f"a key has no {', '.join(wrong)}: set it for the project {key.project}")
        return self._limited(Key, id_, limits, given_up, by)

    def _limited(self, cls: type[L], id_: str, limits: Changes, default: frozenset[str], by: Caller | None) -> L:
        def changed(was: L) -> L:
            own = {**{name: was.limits[name] for name in was.limits.keys() - default}, **limits}
            try:
                Limits().changed(own)
            except ValueError as error:
                raise BadRequest(str(error)) from None
            event = f"{cls.__name__.lower()}_limits_set"
            about = {"subject": id_, **limits, **dict.fromkeys(default, "default")}
            audit.note(self._records, by, _project_of(was), event, about, once=f"{id_} {was.version}")
            return replace(was, limits=own)

        return self._changed(cls, id_, changed)

    def all(self, cls: type[A]) -> list[A]:
        """All accounts of one class, oldest first."""
        found = [load(cls, fields) for _, fields in self._records.list(cls.namespace)]
        return sorted(found, key=lambda account: account.created)

    def rebuild(self) -> tuple[int, list[str]]:
        """Writes to the state server every account that it lacks or has in an older version. Returns the number of
        these accounts, and the keys of damaged objects."""
        found = list(self._files.all())
        damaged = [key for key, account in found if account is None]
        return sum(self._show(account) for _, account in found if account is not None), damaged

    def _added(self, account: A) -> A:
        if not self._files.add(account):
            raise BadRequest(f"{account.id} already exists")
        self._show(account)
        return account

    def _changed(self, cls: type[A], id_: str, change: Callable[[A], A]) -> A:
        for _ in range(_TRIES):
            was = self._newest(cls, id_)
            account = change(replace(was, version=was.version + 1))
            if self._files.add(account):
                self._show(account)
                return account
        raise Unavailable(f"other calls changed {id_} at the same time, {_TRIES} times in a row: try again")

    def _newest(self, cls: type[A], id_: str) -> A:
        """The newest version of the account: the state server's, if the object store was set back to an older backup.
        Of equal versions the state server's counts too: it may be revoked or removed without a new version."""
        kept = self._files.newest(cls, id_)
        known = self._records.find(cls, id_)
        return max(known or kept, kept, key=lambda account: account.version)

    def _known(self, cls: type[A], id_: str) -> A:
        """The account from the state server, which is enough to take it away while the object store is away. Raises
        NotFound."""
        return self._records.find(cls, id_) or self._files.newest(cls, id_)

    def _show(self, account: Account) -> bool:
        return self._records.put_newer(account.namespace, account.id, account.version, dump(account))


def _project_of(account: Project | Key) -> str:
    return account.project if isinstance(account, Key) else account.id


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(_ID_BYTES)


def _named(text: str) -> str:
    if not text.strip() or len(text) > 200 or not text.isprintable():
        raise BadRequest(f"{text[:80]!r} is not a name: give 1 to 200 printable characters")
    return text


class AccountRecovery:
    """Account recovery: restores all accounts at once, and only once. A note in the state server says that the accounts
    are there. If the server loses the accounts, it loses the note too. While the note is there, an unknown key is
    refused without a look into the object store."""

    def __init__(self, accounts: AccountService, records: RedisRecords) -> None:
        self._accounts, self._records = accounts, records
        self._lock = threading.Lock()
        self._failed = float("-inf")

    def __call__(self) -> bool:
        """Restores the accounts; False when they are there already. Raises Unavailable while that is impossible or in
        progress."""
        if self._is_done():
            return False
        if not self._lock.acquire(blocking=False):
            raise Unavailable("the accounts are being read from the object store; try again soon")
        try:
            if not self._is_done():
                self._recover()
        finally:
            self._lock.release()
        return True

    def _is_done(self) -> bool:
        noted = self._records.get(*_NOTE)
        return noted is not None and noted["done"] == "true"

    def _recover(self) -> None:
        if time.monotonic() - self._failed < _RETRY_S:
            raise Unavailable("the object store, which holds the accounts, does not answer; try again soon")
        self._records.put(*_NOTE, {"done": "false"})
        try:
            found, damaged = self._accounts.rebuild()
        except Unavailable:
            self._failed = time.monotonic()
            raise
        # The update does nothing if the note is gone, because the server may have been emptied meanwhile.
        self._records.update(*_NOTE, {"done": "true"})
        log.info("restored %d accounts from the object store", found)
        if damaged:
            log.warning("damaged accounts; restore them in the object store: %s", ", ".join(damaged))

"""Access: the one place that loads a record for a caller. Missing, foreign and expired look alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from app import ids
from app.domain import records
from app.domain.accounts import Caller, Role
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session
from app.errors import BadRequest, Forbidden, NotFound, Unauthorized
from app.ids import TinkerPath
from app.stores.interfaces.records import Records

Owned = TypeVar("Owned", Session, Model, Sampler, Checkpoint, Loss)


def load_owned(store: Records, cls: type[Owned], key: str, caller: Caller, role: Role = "member") -> Owned:
    """What the caller is about to change, or to use up. Raises NotFound as `load_readable`, and Forbidden where he
    may see it but his role in its project is below `role`."""
    found = load_readable(store, cls, key, caller)
    check_role(caller, found.owner, role)
    return found


def load_readable(store: Records, cls: type[Owned], key: str, caller: Caller) -> Owned:
    """What the caller only looks at. Raises NotFound with a text that depends on nothing but what was asked for."""
    stored = store.get(cls.namespace, key)
    found = records.load(cls, stored) if stored else None
    if found is None or not caller.sees(found.owner) or _is_expired(found, store):
        raise NotFound(f"{cls.__name__.lower()} {key[:200]!r} does not exist")
    return found


def load_checkpoint(store: Records, path: TinkerPath, caller: Caller) -> Checkpoint:
    """A checkpoint to look at or to start from: the caller's, or one that is public. Raises NotFound as
    `load_readable`."""
    stored = store.get(Checkpoint.namespace, str(path))
    found = records.load(Checkpoint, stored) if stored else None
    if found is None or not found.public or _is_expired(found, store):
        return load_readable(store, Checkpoint, str(path), caller)
    return found


def may_read(caller: Caller, found: Checkpoint) -> bool:
    """As `load_checkpoint` sees it."""
    return found.public or caller.sees(found.owner)


def check_role(caller: Caller, project: str, role: Role = "member") -> None:
    """Raises Forbidden; the project is one that the caller sees, or his key's."""
    if not caller.may(role, project):
        had = f"a {caller.roles[project]}" if caller.sees(project) else "not in it any more"
        raise Forbidden(f"this takes a {role} of project {project}, and you are {had}")


def _is_expired(found: Session | Model | Sampler | Checkpoint | Loss, store: Records) -> bool:
    """Only checkpoints expire, and most do not: only one that may costs asking for the time."""
    return isinstance(found, Checkpoint) and found.expires_at is not None and found.is_expired(store.now())


class Sources:
    """A weights_access_token is an API key of somebody else, or a token made from one: what its holder may read may be
    loaded or copied with it, as by him. It needs no scope, since every key may read; and it is kept nowhere."""

    def __init__(self, store: Records, callers: Callable[[str], Caller]) -> None:
        self._records, self._callers = store, callers

    def find(self, path: ids.TinkerPath, caller: Caller, token: str | None) -> Checkpoint:
        """Raises NotFound with the same text for what is missing and what neither of them may read; BadRequest for a
        token that is no key, and Unavailable."""
        try:
            return load_checkpoint(self._records, path, caller)
        except NotFound:
            if token is None:
                raise
        try:
            holder = self._callers(token)
        except Unauthorized as error:
            raise BadRequest(f"the weights_access_token is of no use: {error}") from None
        return load_checkpoint(self._records, path, holder)

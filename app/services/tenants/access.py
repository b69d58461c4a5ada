"""Access: the only place that loads a record for a caller. Missing, foreign and expired records give the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from app import ids
from app.domain import records
from app.domain.accounts import Caller, Role
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session
from app.errors import BadRequest, Forbidden, NotFound, Unauthorized
from app.ids import TinkerPath
from app.stores.redis.records import RedisRecords

Owned = TypeVar("Owned", Session, Model, Sampler, Checkpoint, Loss)


def load_owned(store: RedisRecords, cls: type[Owned], key: str, caller: Caller, role: Role = "member") -> Owned:
    """A record that the caller is about to change or to use up. Raises NotFound as `load_readable` does, and Forbidden
    if the caller may see the record but has a role below `role` in its project."""
    found = load_readable(store, cls, key, caller)
    check_role(caller, found.owner, role)
    return found


def load_readable(store: RedisRecords, cls: type[Owned], key: str, caller: Caller) -> Owned:
    """A record that the caller only reads. Raises NotFound with a text that depends only on the request."""
    stored = store.get(cls.namespace, key)
    found = records.load(cls, stored) if stored else None
    if found is None or not caller.sees(found.owner) or _is_expired(found, store):
        raise NotFound(f"{cls.__name__.lower()} {key[:200]!r} does not exist")
    return found


def load_checkpoint(store: RedisRecords, path: TinkerPath, caller: Caller) -> Checkpoint:
    """A checkpoint to read or to start from: one of the caller's, or a public one. Raises NotFound as `load_readable`
    does."""
    stored = store.get(Checkpoint.namespace, str(path))
    found = records.load(Checkpoint, stored) if stored else None
    if found is None or not found.public or _is_expired(found, store):
        return load_readable(store, Checkpoint, str(path), caller)
    return found


def may_read(caller: Caller, found: Checkpoint) -> bool:
    """True if `load_checkpoint` would return the checkpoint to the caller."""
    return found.public or caller.sees(found.owner)


def check_role(caller: Caller, project: str, role: Role = "member") -> None:
    """Raises Forbidden if the caller's role is below `role`. The caller sees the project, or it is the project of the
    caller's key."""
    if not caller.may(role, project):
        had = caller.roles[project] if caller.sees(project) else "none"
        raise Forbidden(f"this needs the role {role} in project {project}; your role is {had}")


def _is_expired(found: Session | Model | Sampler | Checkpoint | Loss, store: RedisRecords) -> bool:
    """True for an expired checkpoint. Only checkpoints expire, and most have no expiry; the time is read only for one
    that has."""
    return isinstance(found, Checkpoint) and found.expires_at is not None and found.is_expired(store.now())


class Sources:
    """Finds the source checkpoint of a load or a copy. A weights_access_token is another user's API key, or a token
    made from one. A checkpoint that the key's owner may read can be loaded or copied with it. The token needs no scope,
    since every key may read, and it is stored nowhere."""

    def __init__(self, store: RedisRecords, authenticator: Callable[[str], Caller]) -> None:
        self._records, self._authenticator = store, authenticator

    def find(self, path: ids.TinkerPath, caller: Caller, token: str | None) -> Checkpoint:
        """The checkpoint. Raises NotFound with the same text for a missing checkpoint and for one that neither the
        caller nor the token may read, BadRequest for a token that is no key, and Unavailable."""
        try:
            return load_checkpoint(self._records, path, caller)
        except NotFound:
            if token is None:
                raise
        try:
            holder = self._authenticator(token)
        except Unauthorized as error:
            raise BadRequest(f"the weights_access_token is not valid: {error}") from None
        return load_checkpoint(self._records, path, holder)

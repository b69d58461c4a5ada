"""Access: finds the caller of a key or a token, and is the only place that loads or lists records for a caller.
Missing, foreign and expired records give the same error.

Tokens (JWTs) stand for a key for a limited time, so that the key itself is sent less often. Only this server signs
them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

from app import ids
from app.domain.accounts import KEY_PREFIX, Caller, Key, Organisation, Role, User
from app.domain.records import Checkpoint, Loss, Model, Sampler, Session, Upload
from app.errors import BadRequest, Forbidden, InvalidToken, NotFound, Unauthorized
from app.ids import TinkerPath
from app.services.tenants.accounts import AccountService, hash_secret
from app.services.views import Page, is_wanted, user_urn
from app.settings import hash_key
from app.stores.redis.client import slices
from app.stores.redis.records import RedisRecords, load
from app.stores.redis.types import Record

Owned = TypeVar("Owned", Session, Model, Sampler, Checkpoint, Upload, Loss)

ListedCheckpoint = tuple[str, Checkpoint]
"""A checkpoint's path and the checkpoint."""

_LONGEST_ID = 512
"""Most characters of an id. A longer one, of which a batch may bring 64 MiB, would only keep the state server busy."""
_PROJECT_DIGITS = 16
_JWT_PREFIX = "eyJ"
_UNKNOWN = "this API key is not known here; check the key, and that the base URL is that of its server"
_ALGORITHM = "HS256"
_ISSUER = "tinsmith"
# Allowed difference between the clocks of two API hosts.
_LEEWAY_S = 30
# The SDK wants a number; these are 48 bits of the id.
_NUMBER_DIGITS = 12
# Checkpoints of a search that are read at a time, with their sessions.
_SLICE = 100


def load_owned(records: RedisRecords, cls: type[Owned], key: str, caller: Caller, role: Role = "member") -> Owned:
    """A record that the caller is about to change or to use up. Raises NotFound as `load_readable` does, and Forbidden
    if the caller may see the record but has a role below `role` in its project."""
    found = load_readable(records, cls, key, caller)
    check_role(caller, found.owner, role)
    return found


def load_readable(records: RedisRecords, cls: type[Owned], key: str, caller: Caller) -> Owned:
    """A record that the caller only reads. Raises NotFound with a text that depends only on the request."""
    found = records.find(cls, key) if len(key) <= _LONGEST_ID else None
    if found is None or not caller.sees(found.owner) or _is_expired(found, records):
        raise missing(cls, key)
    return found


def read_run(records: RedisRecords, model_id: str, caller: Caller) -> Record:
    """All fields of a run that the caller only reads, with those of its journal. Raises NotFound as `load_readable`
    does."""
    stored = records.get(Model.namespace, model_id)
    if stored is None or not caller.sees(load(Model, stored).owner):
        raise missing(Model, model_id)
    return stored


def missing(cls: type[Owned], key: str) -> NotFound:
    """The error of a record that does not exist, with a text that depends only on the request."""
    return NotFound(f"{cls.__name__.lower()} {key[:200]!r} does not exist")


def sampler_exists(sampling_session_seq_id: int) -> BadRequest:
    """The error of a call whose sampling session exists already, and is another one than the call's."""
    return BadRequest(
        f"sampling_session_seq_id {sampling_session_seq_id} was already used for another sampler; use a new one"
    )


def load_checkpoint(records: RedisRecords, path: TinkerPath, caller: Caller) -> Checkpoint:
    """A checkpoint to read or to start from: one of the caller's, or a public one. Raises NotFound as `load_readable`
    does."""
    return find_public(records, path) or load_readable(records, Checkpoint, str(path), caller)


def find_public(records: RedisRecords, path: TinkerPath) -> Checkpoint | None:
    """The checkpoint, if it is published."""
    found = records.find(Checkpoint, str(path))
    return None if found is None or not found.public or _is_expired(found, records) else found


def list_run_checkpoints(
    records: RedisRecords, model_ids: Sequence[str], caller: Caller, *, newest: bool = False
) -> list[list[ListedCheckpoint]]:
    """For each run its checkpoints that the caller may read; of another project's run these are the public ones. Newest
    first and without the expired ones, as in `list_checkpoints`. With `newest` there may be only the newest of each
    kind."""
    prefixes = [ids.checkpoint_path_prefix(model_id) for model_id in model_ids]
    stored = records.readable_checkpoints(prefixes, caller.roles.keys(), newest=newest)
    return [_newest_first(records, found.items()) for found in stored]


def list_checkpoints(records: RedisRecords, projects: Set[str]) -> list[ListedCheckpoint]:
    """The checkpoints of all runs in the projects, newest first and without the expired ones. An index names them: no
    other checkpoint is read."""
    return _newest_first(records, records.list_checkpoints(projects).items())


def list_fields(records: RedisRecords, projects: Set[str], *names: str) -> dict[str, Record]:
    """Some fields of the checkpoints of `list_checkpoints`, by path. Thousands are listed in a tenth of the time."""
    found = records.list_checkpoints(projects, ("expires_at", *names))
    ends = {path: float(at) for path, fields in found.items() if (at := fields.get("expires_at", "null")) != "null"}
    if ends:
        now = records.now()
        return {path: fields for path, fields in found.items() if ends.get(path, math.inf) > now}
    return dict(found)


def page_of_checkpoints(
    records: RedisRecords, projects: Set[str], page: Page
) -> tuple[list[ListedCheckpoint], dict[str, int]]:
    """A page of `list_checkpoints`, and its cursor. Only the checkpoints on the page are read whole."""
    created = {path: float(fields["created"]) for path, fields in list_fields(records, projects, "created").items()}
    shown, cursor = page.of(sorted(created, key=lambda path: (-created[path], path)))
    return _read(records, projects, shown), cursor


def first_wanted(
    records: RedisRecords,
    caller: Caller,
    owner: Mapping[str, Any],
    projects: Set[str],
    paths: Sequence[str],
    most: int,
) -> list[ListedCheckpoint]:
    """The first `most` of these checkpoints of the projects that the `owner` of a search includes. Only these and some
    of the next are read, and of their sessions each once."""
    found: list[ListedCheckpoint] = []
    users: dict[str, str] = {}
    for some in slices(paths, _SLICE):
        slice_ = _read(records, projects, some)
        if owner["type"] != "accessible":
            sessions = {ids.session_of(one.model_id) for _, one in slice_}
            users |= users_of(records, sessions - users.keys())
            its = [(users[ids.session_of(one.model_id)], one.owner) for _, one in slice_]
            slice_ = [one for one, made in zip(slice_, its, strict=True) if is_wanted(caller, owner, *made)]
        found += slice_
        if len(found) >= most:
            break
    return found[:most]


def _read(records: RedisRecords, projects: Set[str], paths: Sequence[str]) -> list[ListedCheckpoint]:
    """The listed checkpoints that are still there and in the projects."""
    found = [(path, load(Checkpoint, fields)) for path, fields in records.read(Checkpoint.namespace, paths) if fields]
    return [(path, one) for path, one in found if one.owner in projects]


def users_of(records: RedisRecords, sessions: Set[str]) -> dict[str, str]:
    """The user who opened each session; empty for an unknown user."""
    found = records.read(Session.namespace, sorted(sessions))
    return {id_: json.loads(fields.get("user", '""')) for id_, fields in found}


def _newest_first(records: RedisRecords, stored: Iterable[tuple[str, Record]]) -> list[ListedCheckpoint]:
    found = [(path, load(Checkpoint, fields)) for path, fields in stored]
    if any(one.expires_at is not None for _, one in found):
        now = records.now()
        found = [(path, one) for path, one in found if not one.is_expired(now)]
    return sorted(found, key=lambda pair: (-pair[1].created, pair[0]))


def check_role(caller: Caller, project: str, role: Role = "member") -> None:
    """Raises Forbidden if the caller's role is below `role`. The caller sees the project, or it is the project of the
    caller's key."""
    if not caller.may(role, project):
        had = caller.roles[project] if caller.sees(project) else "none"
        raise Forbidden(f"this needs the role {role} in project {project}; your role is {had}")


def _is_expired(found: Session | Model | Sampler | Checkpoint | Upload | Loss, records: RedisRecords) -> bool:
    """True for an expired checkpoint or upload. Most checkpoints have no expiry; the time is read only for one that
    has."""
    return isinstance(found, Checkpoint | Upload) and found.expires_at is not None and found.is_expired(records.now())


class Sources:
    """Finds the source checkpoint of a load or a copy. A weights_access_token is another user's API key, or a token
    made from one. A checkpoint that the key's owner may read can be loaded or copied with it. The token needs no scope,
    since every key may read, and it is stored nowhere."""

    def __init__(self, records: RedisRecords, authenticator: Callable[[str], Caller]) -> None:
        self._records, self._authenticator = records, authenticator

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


def project_of(digest: str) -> str:
    """The project of a key of the settings, by the key's digest."""
    return digest[:_PROJECT_DIGITS]


class Authenticator:
    """Finds the caller of a credential. Keys are looked up at every request, so a revoked key and its tokens stop
    working at once. Before an unknown key is rejected, `account_recovery` restores the accounts if the state server was
    emptied.

    `digests` are those of the settings' keys. Each such key is a project of its own; a prefix of the digest is the id
    of both the project and the key. `operators` are the digests of those that operators hold. Without `tokens`, no
    token is accepted.
    """

    def __init__(
        self,
        digests: Sequence[str],
        records: RedisRecords,
        tokens: Tokens | None,
        account_recovery: Callable[[], bool] = lambda: False,
        operators: Sequence[str] = (),
    ) -> None:
        self._operators = frozenset(map(project_of, operators))
        self._digests, self._records, self._tokens, self._account_recovery = digests, records, tokens, account_recovery

    def __call__(self, credential: str) -> Caller:
        """The caller. Raises Unauthorized; InvalidToken when a new token would help; Unavailable while a key cannot be
        looked up."""
        if self._tokens and credential.startswith(_JWT_PREFIX):
            key, ends = self._tokens.key_of(credential)
            return replace(self.holder(key), token_ends=ends)
        digest = hash_key(credential)
        # Every known digest is compared, in constant time.
        if sum(hmac.compare_digest(digest, known) for known in self._digests):
            return self._alone(project_of(digest))
        return self._by_secret(*credential.removeprefix(KEY_PREFIX).partition(".")[::2])

    def check(self, caller: Caller) -> None:
        """Looks the caller's key up again, for a call that waits. Raises Unauthorized once it was revoked, has expired,
        or its user was removed."""
        self.holder(caller.key_id)

    def holder(self, id_: str) -> Caller:
        """The caller of a key, by the key's id. Raises Unauthorized, and Unavailable while it cannot be looked up."""
        if id_ in map(project_of, self._digests):
            return self._alone(id_)
        found = self._find(id_)
        if found is None:
            raise Unauthorized(_UNKNOWN)
        return self._holder_of(*found)

    def _alone(self, id_: str) -> Caller:
        return Caller.alone(id_, is_operator=id_ in self._operators)

    def _by_secret(self, id_: str, secret: str) -> Caller:
        """The caller of a key, by its id and secret. Only a client that knows the secret learns the reason of a
        rejection."""
        found = self._find(id_)
        if not hmac.compare_digest(hash_secret(secret), found[0].digest if found else "") or found is None:
            raise Unauthorized(_UNKNOWN)
        return self._holder_of(*found)

    def _holder_of(self, key: Key, user: User | None) -> Caller:
        if key.revoked_at is not None:
            raise Unauthorized("this API key was revoked")
        if key.expires_at is not None and key.expires_at <= self._records.now():
            raise Unauthorized("this API key has expired")
        if user is None or user.removed:
            raise Unauthorized("the user of this API key was removed")
        return Caller(key.id, user.id, user.organisation, key.project, key.roles(user), frozenset(key.scopes))

    def _find(self, id_: str) -> tuple[Key, User | None] | None:
        found = self._records.find_key(id_)
        return self._records.find_key(id_) if found is None and self._account_recovery() else found


class Tokens:
    """Issues and checks tokens. The signing key is derived from `secret`, the server's own secret. `lifetime_s`:
    seconds that a token is valid."""

    def __init__(self, secret: str, lifetime_s: float) -> None:
        # This import takes a tenth of a second, which a server without tokens should not pay.
        import jwt

        self._jwt = jwt
        self._key = hmac.new(secret.encode(), b"tokens", hashlib.sha256).digest()
        self._lifetime_s = lifetime_s

    def issue(self, caller: Caller, email: str) -> str:
        """A token for the caller's key. A token made with another token ends when that one does, so that tokens cannot
        be renewed for ever. The SDK's `whoami` reads sub, org_id and email from it."""
        now = int(time.time())
        ends = now + int(self._lifetime_s)
        claims = {
            "iss": _ISSUER,
            "iat": now,
            "exp": ends if caller.token_ends is None else min(ends, caller.token_ends),
            "sub": user_urn(caller.user),
            "org_id": caller.organisation,
            "key": caller.key_id,
            **({"email": email} if email else {}),
        }
        return self._jwt.encode(claims, self._key, algorithm=_ALGORITHM)

    def key_of(self, token: str) -> tuple[str, int]:
        """The id of the token's key, and the token's expiry (Unix seconds). Raises InvalidToken for a token that this
        server did not sign, that was changed, or that is too old."""
        required = ["iss", "exp", "key"]
        try:
            claims = self._jwt.decode(
                token,
                self._key,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                leeway=_LEEWAY_S,
                options={"require": required},
            )
        except self._jwt.InvalidTokenError as error:
            raise InvalidToken(f"this token is no longer valid ({error}): get a new one with the API key") from None
        return str(claims["key"]), int(claims["exp"])


class OwnKey:
    """Describes and revokes the caller's own key, and issues tokens for it. A key of the settings has no account: it
    has fewer details, and it is revoked in the settings."""

    def __init__(self, records: RedisRecords, accounts: AccountService, tokens: Tokens | None) -> None:
        self._records, self._accounts, self._tokens = records, accounts, tokens

    def describe(self, caller: Caller) -> dict[str, Any]:
        """The body of GET auth/apikey/me."""
        key = self._records.find(Key, caller.key_id)
        organisation = self._records.find(Organisation, caller.organisation)
        return {
            "key_id": int(caller.key_id[:_NUMBER_DIGITS], 16),
            "name": key.name if key else "a key of the server's settings",
            "note": key.note if key else "",
            "project_id": caller.project,
            "scopes": sorted(caller.scopes),
            "details": {
                "org_details": {"name": organisation.name if organisation else caller.organisation},
                "user_details": {"email": self._email(caller)},
            },
        }

    def revoke(self, caller: Caller) -> None:
        """Revokes the caller's key. Raises Forbidden for a key of the settings."""
        if self._records.find(Key, caller.key_id) is None:
            raise Forbidden("this key is listed in the server's settings (api_keys); to revoke it, remove it there")
        self._accounts.revoke(caller.key_id, by=caller)

    def token(self, caller: Caller) -> str:
        """A token for the caller's key. Raises NotFound if the server accepts no tokens."""
        if self._tokens is None:
            raise NotFound("this server accepts no tokens: send the API key itself (api.pjwt_auth_enabled is off)")
        return self._tokens.issue(caller, self._email(caller))

    def _email(self, caller: Caller) -> str:
        user = self._records.find(User, caller.user)
        return user.email if user else ""

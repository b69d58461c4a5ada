"""Authentication: finds the caller of a key or a token; describes and revokes the caller's own key, and issues tokens
for it.

Tokens (JWTs) stand for a key for a limited time, so that the key itself is sent less often. Only this server signs
them.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from app.domain.accounts import KEY_PREFIX, Caller, Key, Organisation, User
from app.errors import Forbidden, InvalidToken, NotFound, Unauthorized
from app.services.tenants.accounts import AccountService
from app.services.views import user_urn
from app.settings import hash_key
from app.stores.redis.records import RedisRecords

_PROJECT_DIGITS = 16
_JWT_PREFIX = "eyJ"
_UNKNOWN = "this API key is not known here; check the key, and that the base URL is that of its server"
_ALGORITHM = "HS256"
_ISSUER = "tinsmith"
# Allowed difference between the clocks of two API hosts.
_LEEWAY_S = 30
# The SDK wants a number; these are 48 bits of the id.
_NUMBER_DIGITS = 12


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
        id_, _, secret = credential.removeprefix(KEY_PREFIX).partition(".")
        return self._by_secret(id_, secret)

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
        if not hmac.compare_digest(hash_key(secret), found[0].digest if found else "") or found is None:
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
        try:
            claims = self._jwt.decode(
                token,
                self._key,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                leeway=_LEEWAY_S,
                options={"require": ["iss", "exp", "key"]},
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

"""Tokens (JWTs) that stand for a key for a while, so that the key itself travels less. Signed by this server alone."""

from __future__ import annotations

import hashlib
import hmac
import time

from app.domain.identity import Caller
from app.errors import InvalidToken
from app.services.views import user_urn

_ALGORITHM = "HS256"
_ISSUER = "tinsmith"
# Between the clocks of two API hosts.
_LEEWAY_S = 30


class Tokens:
    """`secret` is the server's own; what signs is derived from it. `lifetime_s`: seconds a token is good for."""

    def __init__(self, secret: str, lifetime_s: float) -> None:
        # A tenth of a second, which a server without tokens should not pay.
        import jwt

        self._jwt = jwt
        self._key = hmac.new(secret.encode(), b"tokens", hashlib.sha256).digest()
        self._lifetime_s = lifetime_s

    def issue(self, caller: Caller, email: str) -> str:
        """A token for the caller's key; one made with another token ends with that, else it need never end. The SDK's
        `whoami` reads sub, org_id and email out of it."""
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
        """The id of the key it stands for, and when it ends (unix s). Raises InvalidToken for one that is not ours, was
        changed or is too old."""
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
            raise InvalidToken(f"this token is not good any more ({error}): get another with the API key") from None
        return str(claims["key"]), int(claims["exp"])

"""From what a request shows to who calls: a key of the settings, a key of an account, or a token made from either."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.domain import records
from app.domain.accounts import Key, User
from app.domain.identity import Caller
from app.errors import Unauthorized
from app.services.accounts import KEY_PREFIX, hash_secret
from app.services.tokens import Tokens
from app.settings import hash_key
from app.stores.interfaces import Records

_PROJECT_DIGITS = 16
_JWT_PREFIX = "eyJ"
_UNKNOWN = "this API key is not known here"


class Callers:
    """Keys are looked up at every request, so one that is revoked stops working at once, and its tokens with it. Before
    one is turned away, `recall` brings back what a state server that was emptied does not know.

    `digests` are those of the settings' keys. Each of them is a project of its own, whose id is a prefix of the digest;
    so is the id of the key. Without `tokens` none is accepted.
    """

    def __init__(
        self, digests: Sequence[str], store: Records, tokens: Tokens | None, recall: Callable[[], bool] = lambda: False
    ) -> None:
        self._digests, self._records, self._tokens, self._recall = digests, store, tokens, recall

    def __call__(self, credential: str) -> Caller:
        """Raises Unauthorized; InvalidToken when a new token would do; Unavailable while a key cannot be looked up."""
        if self._tokens and credential.startswith(_JWT_PREFIX):
            key, ends = self._tokens.key_of(credential)
            return replace(self._by_id(key), token_ends=ends)
        digest = hash_key(credential)
        # Every known digest is compared, in constant time.
        if sum(hmac.compare_digest(digest, known) for known in self._digests):
            return Caller.alone(digest[:_PROJECT_DIGITS])
        return self._by_secret(*credential.removeprefix(KEY_PREFIX).partition(".")[::2])

    def _by_id(self, id_: str) -> Caller:
        if id_ in (digest[:_PROJECT_DIGITS] for digest in self._digests):
            return Caller.alone(id_)
        key = self._key(id_)
        if key is None:
            raise Unauthorized(_UNKNOWN)
        return self._holder_of(key)

    def _by_secret(self, id_: str, secret: str) -> Caller:
        """Only who knows a key's secret is told what is wrong with it."""
        key = self._key(id_)
        if not hmac.compare_digest(hash_secret(secret), key.digest if key else "") or key is None:
            raise Unauthorized(_UNKNOWN)
        return self._holder_of(key)

    def _holder_of(self, key: Key) -> Caller:
        if key.revoked_at is not None:
            raise Unauthorized("this API key was revoked")
        if key.expires_at is not None and key.expires_at <= self._records.now():
            raise Unauthorized("this API key has expired")
        stored = self._records.get(User.namespace, key.user)
        user = records.load(User, stored) if stored else None
        if user is None or user.removed:
            raise Unauthorized("the user of this API key was removed")
        return Caller(key.id, user.id, user.organisation, key.project, user.roles, frozenset(key.scopes))

    def _key(self, id_: str) -> Key | None:
        stored = self._records.get(Key.namespace, id_)
        if stored is None and self._recall():
            stored = self._records.get(Key.namespace, id_)
        return records.load(Key, stored) if stored else None

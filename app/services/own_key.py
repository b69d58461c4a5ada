"""What a key can do about itself: say whose it is, get a token, be revoked."""

from __future__ import annotations

from typing import Any

from app.domain import records
from app.domain.accounts import Key, Organisation, User
from app.domain.identity import Caller
from app.errors import Forbidden, NotFound
from app.services.accounts import AccountService
from app.services.tokens import Tokens
from app.stores.interfaces import Records

# The SDK wants a number; these are 48 bits of the id.
_NUMBER_DIGITS = 12


class OwnKey:
    """Keys of the settings have no account: there is less to say of them, and they are revoked there."""

    def __init__(self, store: Records, accounts: AccountService, tokens: Tokens | None) -> None:
        self._records, self._accounts, self._tokens = store, accounts, tokens

    def describe(self, caller: Caller) -> dict[str, Any]:
        """The body of GET auth/apikey/me."""
        key = self._load(Key, caller.key_id)
        organisation = self._load(Organisation, caller.organisation)
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
        """Raises Forbidden for a key of the settings."""
        if self._load(Key, caller.key_id) is None:
            raise Forbidden("this key stands in the server's settings (api_keys): it is revoked by taking it out there")
        self._accounts.revoke(caller.key_id, by=caller)

    def token(self, caller: Caller) -> str:
        """Raises NotFound where the server takes none."""
        if self._tokens is None:
            raise NotFound("this server takes no tokens: send the API key itself (api.pjwt_auth_enabled is off)")
        return self._tokens.issue(caller, self._email(caller))

    def _email(self, caller: Caller) -> str:
        user = self._load(User, caller.user)
        return user.email if user else ""

    def _load(self, cls: type[records.R], id_: str) -> records.R | None:
        stored = self._records.get(cls.namespace, id_)
        return records.load(cls, stored) if stored else None

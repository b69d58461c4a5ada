"""Checkpoints to start from: one's own, public ones, and those of whoever lent a key for them."""

from __future__ import annotations

from collections.abc import Callable

from app import ids
from app.domain.identity import Caller
from app.domain.records import Checkpoint
from app.errors import BadRequest, NotFound, Unauthorized
from app.services.ownership import load_checkpoint
from app.stores.interfaces import Records


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

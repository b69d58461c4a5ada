"""Sessions: the frame a client's models and samplers live in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app import ids
from app.domain import records
from app.domain.records import Session
from app.services.endings import Endings
from app.services.ownership import load_owned
from app.stores.interfaces import Lifecycle, Records


class SessionService:
    """Opened, kept alive and finished; a session is only ever seen by its owner."""

    def __init__(self, store: Records, lifecycle: Lifecycle, endings: Endings) -> None:
        self._records, self._lifecycle, self._endings = store, lifecycle, endings

    def create(self, owner: str, asked: Mapping[str, Any]) -> str:
        """The id of a new session."""
        session_id = ids.new_session_id()
        session = Session(
            owner,
            created=self._records.now(),
            display_name=asked.get("display_name") or "",
            tags=asked["tags"],
            user_metadata=asked["user_metadata"],
        )
        self._records.put_new(Session.namespace, session_id, records.dump(session))
        self._lifecycle.heartbeat(session_id)
        return session_id

    def heartbeat(self, session_id: str, owner: str) -> None:
        """Raises NotFound."""
        load_owned(self._records, Session, session_id, owner)
        self._lifecycle.heartbeat(session_id)

    def finish(self, session_id: str, owner: str, reason: str) -> None:
        """Free what it holds in memory; the first reason given stays. Raises NotFound."""
        load_owned(self._records, Session, session_id, owner)
        self._endings.finish(session_id, reason)

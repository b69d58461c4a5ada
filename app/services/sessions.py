"""Sessions: the frame a client's models and samplers live in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from app import ids
from app.domain import records
from app.domain.records import Session
from app.services.ownership import load_owned
from app.stores.interfaces import Records


class SessionService:
    """Opened, kept alive and finished; a session is only ever seen by its owner."""

    def __init__(self, store: Records) -> None:
        self._records = store

    def create(self, owner: str, asked: Mapping[str, Any]) -> str:
        """The id of a new session."""
        session_id = ids.new_session_id()
        now = time.time()
        session = Session(
            owner,
            created=now,
            last_seen=now,
            display_name=asked.get("display_name") or "",
            tags=asked["tags"],
            user_metadata=asked["user_metadata"],
        )
        self._records.put_new(Session.namespace, session_id, records.dump(session))
        return session_id

    def heartbeat(self, session_id: str, owner: str) -> None:
        """Raises NotFound."""
        load_owned(self._records, Session, session_id, owner)
        self._records.update(Session.namespace, session_id, {"last_seen": json.dumps(time.time())})

    def finish(self, session_id: str, owner: str, reason: str) -> None:
        """The first reason given stays. Raises NotFound."""
        if load_owned(self._records, Session, session_id, owner).status == "open":
            self._records.update(Session.namespace, session_id, {"status": json.dumps(reason)})

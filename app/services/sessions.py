"""Sessions: the frame a client's models and samplers live in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Session
from app.errors import NotFound
from app.services.endings import Endings
from app.services.ownership import check_role, load_owned
from app.stores.interfaces import Lifecycle, Records


class SessionService:
    """Opened, kept alive and finished; a session is only ever seen from its project."""

    def __init__(self, store: Records, lifecycle: Lifecycle, endings: Endings) -> None:
        self._records, self._lifecycle, self._endings = store, lifecycle, endings

    def create(self, caller: Caller, asked: Mapping[str, Any]) -> str:
        """The id of a new session, in `project_id` or the caller's own project.

        Raises NotFound for a project where he may open none, whether it exists or not; Forbidden where his own is one.
        """
        project = asked.get("project_id")
        if project is None:
            project = caller.project
            check_role(caller, project)
        elif not caller.may("member", project):
            raise NotFound(f"project {project[:200]!r} does not exist")
        session_id = ids.new_session_id()
        session = Session(
            project,
            created=self._records.now(),
            display_name=asked.get("display_name") or "",
            tags=asked["tags"],
            user_metadata=asked["user_metadata"],
        )
        self._records.put_new(Session.namespace, session_id, records.dump(session))
        self._lifecycle.heartbeat(session_id)
        return session_id

    def heartbeat(self, session_id: str, caller: Caller) -> None:
        """Raises NotFound."""
        load_owned(self._records, Session, session_id, caller)
        self._lifecycle.heartbeat(session_id)

    def finish(self, session_id: str, caller: Caller, reason: str) -> None:
        """Free what it holds in memory; the first reason given stays. Raises NotFound."""
        load_owned(self._records, Session, session_id, caller)
        self._endings.finish(session_id, reason)

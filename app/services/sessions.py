"""Sessions: the frame a client's models and samplers live in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app import ids
from app.domain import records
from app.domain.identity import Caller
from app.domain.records import Checkpoint, Model, Sampler, Session
from app.errors import BadRequest
from app.services import audit
from app.services.allowances import AllowanceService
from app.services.endings import Endings
from app.services.lists import Page, Scope, check_writable, projects
from app.services.ownership import check_role, load_owned, load_readable
from app.services.views import texts
from app.stores.interfaces import Lifecycle, ObjectStore, Records
from app.stores.objects.moves import note_move


class SessionService:
    """Opened, kept alive and finished; a session is only ever seen from its project."""

    def __init__(
        self,
        store: Records,
        lifecycle: Lifecycle,
        objects: ObjectStore,
        endings: Endings,
        allowances: AllowanceService,
    ) -> None:
        self._records, self._lifecycle, self._objects, self._endings = store, lifecycle, objects, endings
        self._allowances = allowances

    def create(self, caller: Caller, asked: Mapping[str, Any]) -> str:
        """The id of a new session, in `project_id` or the caller's own project.

        Raises NotFound for a project where he may open none, whether it exists or not; Forbidden where his own is one.
        """
        project = asked.get("project_id")
        if project is None:
            project = caller.project
            check_role(caller, project)
        check_writable(caller, project)
        self._allowances.take(caller, project)
        session_id = ids.new_session_id()
        session = Session(
            project,
            created=self._records.now(),
            display_name=asked.get("display_name") or "",
            tags=asked["tags"],
            user_metadata=asked["user_metadata"],
            user=caller.user,
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

    def list_ids(self, caller: Caller, scope: Scope, page: Page) -> list[str]:
        """Newest first."""
        within = projects(caller, scope)
        stored = [(id_, records.load(Session, fields)) for id_, fields in self._records.list(Session.namespace)]
        found = sorted((-session.created, id_) for id_, session in stored if session.owner in within)
        return [id_ for _, id_ in page.of(found)[0]]

    def describe(self, session_id: str, caller: Caller) -> dict[str, Any]:
        """What is in it. Raises NotFound."""
        session = load_readable(self._records, Session, session_id, caller)
        return {
            "training_run_ids": [id_ for id_, _ in self._records.list(Model.namespace, ids.model_prefix(session_id))],
            "sampler_ids": [id_ for id_, _ in self._records.list(Sampler.namespace, ids.sampler_prefix(session_id))],
            "user_metadata": texts(session.user_metadata),
            "display_name": session.display_name or None,
        }

    def move(self, session_id: str, caller: Caller, project: str) -> None:
        """It goes to another project with all that is in it, checkpoints included. Again is fine.

        Raises NotFound for either, as `create` does, Forbidden where the caller only sees the session, and BadRequest
        for the one of a project's OpenAI-compatible calls: further ones would be made in it, and count for `project`.
        """
        session = load_owned(self._records, Session, session_id, caller)
        check_writable(caller, project)
        if session_id == ids.openai_session_id(session.owner):
            raise BadRequest(f"session {session_id} is that of its project's OpenAI-compatible calls, and stays there")
        if session.owner != project:
            self._allowances.move(caller, project, *self._brings(session_id, session))
        for scope in {session.owner, project}:
            moved = {"session_id": session_id, "from_project_id": session.owner, "to_project_id": project}
            audit.note(self._records, caller, scope, "session_move", moved)
        note_move(self._objects, session_id, self._records.now(), project)
        self._lifecycle.move(session_id, project)

    def _brings(self, session_id: str, session: Session) -> tuple[int, int]:
        """Its live models, and the bytes of its checkpoints."""
        runs = self._records.list(Model.namespace, ids.model_prefix(session_id))
        live = sum(_is_live(fields) for _, fields in runs) if session.status == "open" else 0
        stored = self._records.list(Checkpoint.namespace, f"tinker://{ids.model_prefix(session_id)}")
        return live, sum(records.load(Checkpoint, fields).size_bytes for _, fields in stored)


def _is_live(run: Mapping[str, str]) -> bool:
    """Whether a run of an open session counts for its project, as `live_models` of limits.lua says it does."""
    unloaded = "unloaded" in run and float(run.get("last_request", 0)) <= float(run["unloaded"])
    return "ended" not in run and run["state"] != '"failed"' and not unloaded

"""Sessions: the frame a client's models and samplers live in; their search, and their calls as a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from app import ids
from app.domain import records
from app.domain.accounts import Caller
from app.domain.records import Checkpoint, Model, Sampler, Session
from app.errors import BadRequest, NotFound
from app.services.teardown import Endings
from app.services.tenants import audit
from app.services.tenants.access import check_role, load_owned, load_readable
from app.services.tenants.limits import AllowanceService
from app.services.views import Page, Scope, check_seen, check_writable, projects, texts, timestamp
from app.signing import UrlSigner
from app.stores.interfaces.queues import Call, Calls
from app.stores.interfaces.records import Lifecycle, Records
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import note_move

Found = tuple[str, Session]
_REASONS = ("success", "errored", "interrupted")

_LINK_SECONDS = 3600


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


class SessionSearch:
    """Newest first, a page at a time; a page goes on right behind the last session of the one before."""

    def __init__(self, store: Records) -> None:
        self._records = store

    def __call__(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The body of sessions/search. Raises NotFound for a project the caller does not see."""
        fits = _filter(caller, asked)
        stored = ((id_, records.load(Session, fields)) for id_, fields in self._records.list(Session.namespace))
        found = sorted((pair for pair in stored if fits(pair)), key=_place, reverse=True)
        shown = found[: asked["limit"]]
        answer: dict[str, Any] = {"sessions": [self._summary(pair) for pair in shown]}
        if len(found) > len(shown):
            last_id, last = shown[-1]
            answer["next_cursor"] = {"last_created_at": timestamp(last.created), "last_session_id": last_id}
        return answer

    def _summary(self, found: Found) -> dict[str, Any]:
        session_id, session = found
        stored = self._records.list(Checkpoint.namespace, f"tinker://{ids.model_prefix(session_id)}")
        sizes = [records.load(Checkpoint, fields).size_bytes for _, fields in stored]
        return {
            "session_id": session_id,
            "created_at": timestamp(session.created),
            "owner": session.owner,
            "project_id": session.owner,
            "status": _status(session),
            "checkpoints_count": len(sizes),
            "checkpoint_storage_bytes": sum(sizes),
            "display_name": session.display_name or None,
            "user_metadata": texts(session.user_metadata),
        }


def _filter(caller: Caller, asked: Mapping[str, Any]) -> Callable[[Found], bool]:
    owner = asked["owner"]
    within = projects(caller, "owned" if owner["type"] == "own" else "accessible")
    if asked["project_ids"] is not None:
        within &= {check_seen(caller, project) for project in asked["project_ids"]}
    if owner["type"] == "user":
        within &= set(owner["owner_urns"])
    wanted = asked["user_metadata"].items()

    def fits(found: Found) -> bool:
        session = found[1]
        return (
            session.owner in within
            and _is_named(found, asked["session_id"], asked["display_name"])
            and wanted <= texts(session.user_metadata).items()
            and _has_status(session, asked["statuses"])
            and (asked["cursor"] is None or _place(found) < _after(asked["cursor"]))
        )

    return fits


def _is_named(found: Found, session_id: str | None, name: str | None) -> bool:
    """By its id or by each of the words of its name; anything fits where neither is asked for."""
    if session_id is None and name is None:
        return True
    called = found[1].display_name.casefold()
    return found[0] == session_id or (name is not None and all(word in called for word in name.casefold().split()))


def _has_status(session: Session, statuses: list[dict[str, Any]] | None) -> bool:
    if statuses is None:
        return True
    kind = (_status(session) or {}).get("type")
    return any(
        asked["type"] == kind and (asked["reasons"] is None or session.status in asked["reasons"]) for asked in statuses
    )


def _status(session: Session) -> dict[str, Any] | None:
    """None for one that nobody has heard of for long, and did not finish."""
    if session.status == "open":
        return {"type": "active"}
    return {"type": "client_finished", "reason": {"type": session.status}} if session.status in _REASONS else None


def _place(found: Found) -> tuple[datetime, str]:
    return datetime.fromtimestamp(found[1].created, UTC), found[0]


def _after(cursor: Mapping[str, Any]) -> tuple[datetime, str]:
    return cursor["last_created_at"], cursor["last_session_id"]


class TraceService:
    """Nothing is built beforehand or kept: the link leads to the trace as it is when it is followed."""

    def __init__(self, store: Records, calls: Calls, signer: UrlSigner) -> None:
        self._records, self._calls, self._signer = store, calls, signer

    def export(self, session_id: str, caller: Caller) -> dict[str, str]:
        """The body of trace_export, with a link that needs no key. Raises NotFound."""
        load_readable(self._records, Session, session_id, caller)
        try:
            url = self._signer.url(_route(session_id), int(time.time()) + _LINK_SECONDS)
        except NotFound as error:
            return {"status": "failed", "error": str(error)}
        return {"status": "ready", "url": url}

    def read(self, session_id: str, expires: int, signature: str) -> dict[str, Any]:
        """The trace behind a link. Raises Forbidden."""
        self._signer.check(_route(session_id), expires, signature)
        return {"displayTimeUnit": "ms", "traceEvents": list(self._events(session_id))}

    def _events(self, session_id: str) -> Iterator[dict[str, Any]]:
        """One process for each run and each sampler; its calls overlap, as they are sent before the last has ended."""
        models = [id_ for id_, _ in self._records.list(Model.namespace, ids.model_prefix(session_id))]
        samplers = [id_ for id_, _ in self._records.list(Sampler.namespace, ids.sampler_prefix(session_id))]
        calls = [(id_, self._calls.of_model(id_)) for id_ in models]
        calls += [(id_, self._calls.of_sampler(id_)) for id_ in samplers]
        for process, (id_, found) in enumerate(calls, start=1):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": id_}}
            for call in found:
                yield from _span(process, call)


def _span(process: int, call: Call) -> Iterator[dict[str, Any]]:
    """From its admission to its result; open where there is none yet."""
    common = {"name": call.kind, "cat": "call", "id": call.request_id, "pid": process, "tid": 0}
    yield {**common, "ph": "b", "ts": round(call.admitted * 1e6), "args": {"state": call.state}}
    if call.ended is not None:
        yield {**common, "ph": "e", "ts": round(call.ended * 1e6)}


def _route(session_id: str) -> str:
    return f"sessions/{session_id}/trace"

"""Sessions: create, keep alive, finish, move, search and trace. A session holds a client's models and samplers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.records import Checkpoint, Model, Sampler, Session
from app.errors import BadRequest, NotFound
from app.services.teardown import Teardown
from app.services.tenants import audit
from app.services.tenants.access import load_owned, load_readable, project_to_write
from app.services.tenants.limits import QuotaService
from app.services.views import (
    AccessScope,
    Page,
    check_writable,
    is_wanted,
    owner_of,
    projects,
    searched,
    texts,
    timestamp,
)
from app.signing import UrlSigner
from app.stores.objects.base import ObjectStore
from app.stores.objects.notes import note_move
from app.stores.redis.backlog import RedisCalls
from app.stores.redis.client import slices
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, dump, load
from app.stores.redis.types import Call

ListedSession = tuple[str, Session]
"""A session's id and the session."""
_REASONS = ("success", "errored", "interrupted")

# Characters of the explanation that a client gives when it finishes a session. A longer one is cut: to refuse it would
# leave the session open.
_MOST_DETAIL = 4096
_LINK_SECONDS = 3600
# Records of a search in one round trip, which takes some 20 ms.
_SLICE = 100


class SessionService:
    """Creates, keeps alive, finishes, describes and moves sessions. A session is visible only from its project.
    A method that changes something also raises Forbidden for a viewer, and the errors of QuotaService."""

    def __init__(
        self,
        records: RedisRecords,
        lifecycle: RedisLifecycle,
        objects: ObjectStore,
        teardown: Teardown,
        quotas: QuotaService,
    ) -> None:
        self._records, self._lifecycle, self._objects, self._teardown = records, lifecycle, objects, teardown
        self._quotas = quotas

    def create(self, caller: Caller, asked: Mapping[str, Any], key: str | None = None) -> str:
        """Creates a session in `project_id` or the caller's own project, and returns its id. A repeat of the call under
        the same idempotency key returns the same id and costs nothing.

        Raises NotFound for a `project_id` where the caller may not create sessions, whether that project exists or not.
        Without `project_id`, raises Forbidden if the caller may not create sessions in the own project. Raises
        TooManyRequests or LimitReached for a limit of the project or of the caller's key.
        """
        project = project_to_write(caller, asked.get("project_id"))
        session_id = ids.session_id(project, caller.key_id, key)
        session = Session(
            project,
            created=self._records.now(),
            display_name=asked.get("display_name") or "",
            tags=asked["tags"],
            user_metadata=asked["user_metadata"],
            user=caller.user,
        )
        fields = dump(session) | {"key": json.dumps(caller.key_id)}
        self._lifecycle.open(session_id, fields, self._quotas.of_session(caller, project))
        return session_id

    def heartbeat(self, session_id: str, caller: Caller) -> None:
        """Keeps the session alive. Raises NotFound."""
        load_owned(self._records, Session, session_id, caller)
        self._lifecycle.heartbeat(session_id)

    def finish(self, session_id: str, caller: Caller, reason: str, detail: str) -> None:
        """Finishes the session and frees its memory; the first reason given is kept, with its detail. Raises
        NotFound."""
        load_owned(self._records, Session, session_id, caller)
        # The teardown finishes the session without a detail. It comes second, because the first finish stays.
        self._lifecycle.finish(session_id, reason, detail[:_MOST_DETAIL])
        self._teardown.finish(session_id, reason)

    def list_ids(self, caller: Caller, scope: AccessScope, page: Page) -> list[str]:
        """Session ids, newest first."""
        within = projects(caller, scope)
        found = sorted((-created, id_) for created, id_ in self._records.list_sessions(within))
        return [id_ for _, id_ in page.of(found)[0]]

    def describe(self, session_id: str, caller: Caller) -> dict[str, Any]:
        """The session's models and samplers, newest first, and its metadata. Raises NotFound."""
        session = load_readable(self._records, Session, session_id, caller)
        return {
            "training_run_ids": ids.newest_first(self._records.ids(Model.namespace, ids.model_prefix(session_id))),
            "sampler_ids": ids.newest_first(self._records.ids(Sampler.namespace, ids.sampler_prefix(session_id))),
            "user_metadata": texts(session.user_metadata),
            "display_name": session.display_name or None,
        }

    def move(self, session_id: str, caller: Caller, project: str) -> None:
        """Moves the session, with its checkpoints and everything else in it, to another project. A repeat completes a
        move that broke off.

        Raises NotFound for the session or the project, as `create` does. Raises Forbidden if the caller may only view
        the session. Raises BadRequest for the session of a project's OpenAI-compatible calls: later calls would still
        be made in that session and would count for `project`.
        """
        session = load_owned(self._records, Session, session_id, caller)
        check_writable(caller, project)
        if session_id == ids.openai_session_id(session.owner):
            raise BadRequest(
                f"session {session_id} belongs to the OpenAI-compatible calls of its project and cannot be moved"
            )
        if session.owner == project:
            self._quotas.take(caller, project)
            self._lifecycle.move(session_id, project, begun=True)
            return
        models, size = self._brings(session_id, session)
        self._quotas.move(caller, project, sessions=int(session.status == "open"), models=models, size=size)
        for scope in (session.owner, project):
            moved = {"session_id": session_id, "from_project_id": session.owner, "to_project_id": project}
            audit.note(self._records, caller, scope, "session_move", moved)
        note_move(self._objects, session_id, self._records.now(), project)
        self._lifecycle.move(session_id, project)

    def _brings(self, session_id: str, session: Session) -> tuple[int, int]:
        """The session's number of live models, and the bytes of its checkpoints."""
        runs = self._records.list(Model.namespace, ids.model_prefix(session_id))
        live = sum(_is_live(fields) for _, fields in runs) if session.status == "open" else 0
        stored = self._records.list(Checkpoint.namespace, _checkpoints_of(session_id))
        return live, sum(load(Checkpoint, fields).size_bytes for _, fields in stored)


def _is_live(run: Mapping[str, str]) -> bool:
    """True if a run of an open session counts as live for its project, by the same rule as `live_models` in
    limits.lua."""
    unloaded = "unloaded" in run and float(run.get("last_request", 0)) <= float(run["unloaded"])
    return "ended" not in run and run["state"] != '"failed"' and not unloaded


class SessionSearch:
    """Searches sessions, newest first, one page at a time. A page starts right after the last session of the previous
    page."""

    def __init__(self, records: RedisRecords) -> None:
        self._records = records

    def __call__(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The body of sessions/search. Raises NotFound for a project that the caller does not see."""
        found = list(islice(self._found(caller, asked), asked["limit"] + 1))
        shown = found[: asked["limit"]]
        answer: dict[str, Any] = {"sessions": self._summaries(shown)}
        if len(found) > len(shown):
            last_id, last = shown[-1]
            answer["next_cursor"] = {"last_created_at": timestamp(last.created), "last_session_id": last_id}
        return answer

    def _found(self, caller: Caller, asked: Mapping[str, Any]) -> Iterator[ListedSession]:
        """The sessions that fit, newest first; whoever stops early reads few of them."""
        within = searched(caller, asked["owner"], asked["project_ids"])
        places = ((datetime.fromtimestamp(created, UTC), id_) for created, id_ in self._records.list_sessions(within))
        cursor = asked["cursor"] and (asked["cursor"]["last_created_at"], asked["cursor"]["last_session_id"])
        listed = [place[1] for place in sorted(places, reverse=True) if cursor is None or place < cursor]
        for slice_ in slices(listed, _SLICE):
            for id_, fields in self._records.read(Session.namespace, slice_):
                if fields and _fits(found := (id_, load(Session, fields)), caller, within, asked):
                    yield found

    def _summaries(self, found: Sequence[ListedSession]) -> list[dict[str, Any]]:
        prefixes = [_checkpoints_of(session_id) for session_id, _ in found]
        owners = {session.owner for _, session in found}
        stored = self._records.size_of_checkpoints(prefixes, owners)
        return [_summary(*pair, *its) for pair, its in zip(found, stored, strict=True)]


def _checkpoints_of(session_id: str) -> str:
    """The prefix of the paths of all checkpoints of a session."""
    return f"tinker://{ids.model_prefix(session_id)}"


def _summary(session_id: str, session: Session, checkpoints: int, size: int) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "created_at": timestamp(session.created),
        "owner": owner_of(session.user, session.owner),
        "project_id": session.owner,
        "status": _status(session),
        "checkpoints_count": checkpoints,
        "checkpoint_storage_bytes": size,
        "display_name": session.display_name or None,
        "user_metadata": texts(session.user_metadata),
    }


def _fits(found: ListedSession, caller: Caller, within: Set[str], asked: Mapping[str, Any]) -> bool:
    """True for a session in the projects `within` that fits in all but its place."""
    session = found[1]
    return (
        session.owner in within
        and is_wanted(caller, asked["owner"], session.user, session.owner)
        and _is_named(found, asked["session_id"], asked["display_name"])
        and asked["user_metadata"].items() <= texts(session.user_metadata).items()
        and _has_status(session, asked["statuses"])
    )


def _is_named(found: ListedSession, session_id: str | None, name: str | None) -> bool:
    """True if the session has this id, or its name contains each word of `name`. Any session fits if neither is
    given."""
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
    """The session's status; None if its heartbeats stopped long ago and it was not finished."""
    if session.status == "open":
        return {"type": "active"}
    if session.status not in _REASONS:
        return None
    return {"type": "client_finished", "reason": {"type": session.status}, "detail": session.detail or None}


class TraceService:
    """Exports a session's calls as a trace. Nothing is built beforehand or stored: the link returns the trace as it is
    when the link is followed."""

    def __init__(self, records: RedisRecords, calls: RedisCalls, signer: UrlSigner) -> None:
        self._records, self._calls, self._signer = records, calls, signer

    def export(self, session_id: str, caller: Caller) -> dict[str, str]:
        """The body of trace_export, with a link that needs no key. Raises NotFound."""
        load_readable(self._records, Session, session_id, caller)
        try:
            url = self._signer.url(_route(session_id), int(time.time()) + _LINK_SECONDS)
        except NotFound as error:
            return {"status": "failed", "error": str(error)}
        return {"status": "ready", "url": url}

    def read(self, session_id: str, expires: int, signature: str) -> dict[str, Any]:
        """The trace for a signed link. Raises Forbidden."""
        self._signer.check(_route(session_id), expires, signature)
        return {"displayTimeUnit": "ms", "traceEvents": list(self._events(session_id))}

    def _events(self, session_id: str) -> Iterator[dict[str, Any]]:
        """Trace events, one process for each run and each sampler. Calls of a process overlap, because a client sends a
        call before the previous one has ended."""
        models = [id_ for id_, _ in self._records.list(Model.namespace, ids.model_prefix(session_id))]
        samplers = [id_ for id_, _ in self._records.list(Sampler.namespace, ids.sampler_prefix(session_id))]
        calls = [(id_, self._calls.of_model(id_)) for id_ in models]
        calls += [(id_, self._calls.of_sampler(id_)) for id_ in samplers]
        for process, (id_, found) in enumerate(calls, start=1):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": id_}}
            for call in found:
                yield from _span(process, call)


def _span(process: int, call: Call) -> Iterator[dict[str, Any]]:
    """Events of one call, from its admission to its result. The span stays open while there is no result."""
    common = {"name": call.kind, "cat": "call", "id": call.request_id, "pid": process, "tid": 0}
    yield {**common, "ph": "b", "ts": round(call.admitted * 1e6), "args": {"state": call.state}}
    if call.ended is not None:
        yield {**common, "ph": "e", "ts": round(call.ended * 1e6)}


def _route(session_id: str) -> str:
    return f"sessions/{session_id}/trace"

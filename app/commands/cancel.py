"""The action of `tinsmith cancel`: ends the runs and the samples of a session or of a project."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import redis

from app import ids
from app.commands.connection import account_service, connected, settings_of
from app.dispatch import Dispatcher, celery_app
from app.domain.accounts import Project
from app.domain.records import Model, Session
from app.errors import SetupError, TinsmithError
from app.services.teardown import Teardown
from app.services.tenants import audit
from app.services.tenants.authentication import project_of
from app.settings import Settings
from app.stack.config import Options
from app.stack.terminal import counted, show, visible
from app.stores.objects import create
from app.stores.objects.base import ObjectStore
from app.stores.redis.backlog import RedisBacklog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import RedisRecords, load

_INTERRUPTED = "interrupted"
_MOST_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Found:
    """The runs to end, by id with the project of each, and the sessions to end. `calls` of these runs and `samples` of
    these sessions have no result yet."""

    runs: Mapping[str, str]
    sessions: Collection[str]
    calls: int
    samples: int

    def __str__(self) -> str:
        return f"{counted(len(self.runs), 'run')} and {counted(len(self.sessions), 'session')}"

    @property
    def failing(self) -> str:
        return f"{counted(self.calls, 'waiting call')} and {counted(self.samples, 'sample')}"


def cancel(options: Options, target: str, *, sure: bool, as_json: bool) -> int:
    """Ends the runs and the samples of a session or a project, after a question unless `sure`.

    Raises TinsmithError if there is no such session or project, or if the answer is no. Raises SetupError if nobody can
    be asked, or if a server is away.
    """
    settings = settings_of(options)
    objects = create(settings)
    with connected(settings) as client:
        cancelling = Cancelling(settings, client, objects)
        found = cancelling.find(target)
        if found.runs or found.sessions:
            if not sure:
                _ask(f"End {found} of {target}? {found.failing} will fail; checkpoints stay.")
            cancelling.end(found)
    if as_json:
        counts = {"calls": found.calls, "samples": found.samples}
        show(json.dumps({"runs": sorted(found.runs), "sessions": sorted(found.sessions), **counts}))
    elif found.runs or found.sessions:
        show(f"ended {found} of {target}; {found.failing} failed; checkpoints stay")
    else:
        show(f"there is nothing to end in {target}")
    return 0


class Cancelling:
    """Finds what there is to end, and ends it as `DELETE training_runs` and the end of a client would."""

    def __init__(self, settings: Settings, client: redis.Redis, objects: ObjectStore) -> None:
        self._settings, self._objects = settings, objects
        self._records = RedisRecords(client, settings.engine)
        self._backlog = RedisBacklog(client, settings.engine)
        self._lifecycle = RedisLifecycle(client, settings.engine)
        wake = Dispatcher(celery_app(settings)).wake
        self._teardown = Teardown(self._lifecycle, self._records, objects, wake)

    def find(self, target: str) -> Found:
        """Reads what there is to end. Raises TinsmithError for an unknown session or project."""
        sessions = self._sessions(target)
        runs = dict(self._runs(target, sessions))
        heard = self._lifecycle.heard(list(sessions))
        ended = {id_ for id_, session in sessions.items() if id_ in heard or session.status in ("open", "expired")}
        unfinished = self._backlog.unfinished(_MOST_WAITING)
        return Found(
            runs,
            ended,
            sum(line.waiting for line in unfinished.models if line.model_id in runs),
            sum(sample.request_id.partition(":")[0] in ended for sample in unfinished.samples),
        )

    def end(self, found: Found) -> None:
        """Ends it: finishes the sessions, which cancels their samples, and ends each run. A repeat goes on where this
        was cut short."""
        for session_id in found.sessions:
            self._teardown.finish(session_id, _INTERRUPTED)
        for model_id, project in found.runs.items():
            audit.note(self._records, None, project, "run_delete", {"model_id": model_id}, urgent=True)
            self._teardown.end(model_id)

    def _sessions(self, target: str) -> dict[str, Session]:
        session = self._records.find(Session, target)
        if session is not None:
            return {target: session}
        listed = [id_ for _, id_ in self._records.list_sessions({target})]
        if not listed and target not in self._projects():
            raise TinsmithError(f"there is no session or project {target!r}; `tinsmith status --json` lists the runs")
        read = self._records.read(Session.namespace, listed)
        return {id_: load(Session, fields) for id_, fields in read if fields}

    def _projects(self) -> set[str]:
        accounts = account_service(self._settings, self._objects).all(Project)
        return {*map(project_of, self._settings.api_keys), *(project.id for project in accounts)}

    def _runs(self, target: str, sessions: Mapping[str, Session]) -> Iterator[tuple[str, str]]:
        """The runs that have not ended. A copy of a checkpoint is none."""
        if target in sessions:
            listed = list(self._records.ids(Model.namespace, ids.model_prefix(target)))
        else:
            listed = [id_ for _, id_ in self._records.list_runs({target})]
        for model_id, fields in self._records.read(Model.namespace, listed):
            if fields and "ended" not in fields:
                model = load(Model, fields)
                if not model.copied_from:
                    yield model_id, model.owner


def _ask(question: str) -> None:
    """Raises TinsmithError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise SetupError(
            "cannot ask for confirmation, because the input is not a terminal: add --yes to go on without it"
        )
    print(visible(question), "[y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise TinsmithError("nothing was ended")

"""News of runs, which `tinsmith up` prints: a line for one that starts or ends, and one every ten seconds for one that
trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import redis

from app import ids
from app.domain.progress import described
from app.domain.records import Model, Session
from app.stores.redis import keys
from app.stores.redis.records import RedisRecords, load

_EVERY_S = 5.0
# Between two lines of a run that goes on.
_PAUSE_S = 10.0
# Of a look; with hundreds of runs the lines would say nothing.
_MOST_LINES = 10
_POINTS = 64


@dataclass(slots=True)
class _Said:
    """A run that was told of: its steps and tokens then, and the time in unix seconds."""

    steps: int
    tokens: int
    at: float


class RunNews:
    """Looks at the runs of the sessions that are in use, and says what has changed. A run that starts and ends between
    two looks is not told of."""

    def __init__(self, records: RedisRecords, client: redis.Redis, say: Callable[[str], None]) -> None:
        self._records, self._redis, self._say = records, client, say
        self._known: dict[str, _Said] = {}

    def follow(self, stopping: threading.Event) -> None:
        """Looks every few seconds until `stopping` is set. While the state server is away there are no news."""
        while not stopping.wait(_EVERY_S):
            with suppress(redis.RedisError):
                self.look()

    def look(self) -> None:
        """Says what is new. Raises redis.RedisError."""
        news = list(self._news())
        for line in news[:_MOST_LINES]:
            self._say(line)
        if len(news) > _MOST_LINES:
            self._say(f"and news of {len(news) - _MOST_LINES} other runs: see `tinsmith status`")

    def _news(self) -> Iterator[str]:
        now, live = self._records.now(), self._live()
        found = dict(zip(live, self._records.progress(list(live), _POINTS), strict=True))
        for model_id in self._known.keys() - live.keys():
            steps = self._known.pop(model_id).steps
            yield f"run {short(model_id)} has ended after {_steps(steps)}: {self._cause(model_id)}"
        for model_id, progress in found.items():
            said = self._known.get(model_id)
            if said is None:
                yield f"run {short(model_id)} starts{_from(progress.steps)}: {_of(live[model_id])}"
            elif now - said.at < _PAUSE_S or (progress.steps, progress.trained_tokens) == (said.steps, said.tokens):
                continue
            else:
                yield f"run {short(model_id)}: {described(progress, now)}"
            self._known[model_id] = _Said(progress.steps, progress.trained_tokens, now)

    def _live(self) -> dict[str, Model]:
        """The runs in use, by id."""
        heard = {id_.decode() for id_ in cast("list[bytes]", self._redis.zrange(keys.SESSIONS_HEARD, 0, -1))}
        used = [id_ for id_ in self._records.ids(Model.namespace, "") if ids.session_of(id_) in heard]
        found = dict(self._records.read(Model.namespace, used))
        return {id_: load(Model, fields) for id_, fields in found.items() if fields and not _over(fields)}

    def _cause(self, model_id: str) -> str:
        fields = self._records.get(Model.namespace, model_id)
        over = "it was deleted" if fields is None else _over(fields)
        if over:
            return over
        session = self._records.find(Session, ids.session_of(model_id))
        status = session.status if session else "expired"
        return "its session expired" if status == "expired" else f"its session was finished ({status})"


def _over(fields: Mapping[str, str]) -> str:
    """Why a run is over though its session goes on; empty for one that is not."""
    if "ended" in fields:
        return "it was deleted"
    if fields.get("state") == '"failed"':
        return "it could not be made"
    if "unloaded" in fields and float(fields.get("last_request", 0)) <= float(fields["unloaded"]):
        return "it was unloaded"
    return "it is a copy" if fields.get("copied_from", '""') != '""' else ""


def short(model_id: str) -> str:
    """A run's name in a line of 80 columns: the first eight characters of its session, and its number there."""
    session, _, number = model_id.partition(":train:")
    return f"{session[:8]}:{number}"


def _of(run: Model) -> str:
    return f"{run.kind} of {run.base_model}, project {run.owner}"


def _from(steps: int) -> str:
    return f" at step {steps}" if steps else ""


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"

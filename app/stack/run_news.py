"""News of runs for the output of `tinsmith up`: a line when a run starts or ends, and one every ten seconds while it
trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import redis

from app import ids
from app.domain.progress import NEWEST_POINTS, described
from app.domain.records import Model, Session
from app.stack.signals import StopFlag
from app.stack.terminal import counted
from app.stores.redis import keys
from app.stores.redis.client import texts
from app.stores.redis.records import RedisRecords

_EVERY_S = 5.0
# Between two lines of a run that goes on.
_PAUSE_S = 10.0
# Of a look; with hundreds of runs the lines would say nothing.
_MOST_LINES = 10
# What a look reads of every run: there may be thousands, and most are idle.
_FIELDS = ("steps", "trained_tokens", "ended", "state", "unloaded", "last_request", "copied_from")


class _Run(NamedTuple):
    steps: int
    tokens: int


class _Said(NamedTuple):
    """The last printed line of a run: the steps and tokens in it, and its time in unix seconds."""

    steps: int
    tokens: int
    at: float

    def is_due(self, run: _Run, now: float) -> bool:
        return now - self.at >= _PAUSE_S and (run.steps, run.tokens) != (self.steps, self.tokens)


class RunNews:
    """Reads the runs of live sessions, and passes lines about changes to `say`. A run that starts and ends between two
    reads gets no line."""

    def __init__(self, records: RedisRecords, client: redis.Redis, say: Callable[[str], None]) -> None:
        self._records, self._redis, self._say = records, client, say
        self._known: dict[str, _Said] = {}

    def follow(self, stopping: StopFlag) -> None:
        """Looks every few seconds until `stopping` is set. While the state server is away there are no news."""
        while not stopping.wait(_EVERY_S):
            with suppress(redis.RedisError):
                self.look()

    def look(self) -> None:
        """Passes the news to `say`. Lines over the limit follow at the next look. Raises redis.RedisError."""
        now, live = self._records.now(), self._live()
        started = live.keys() - self._known.keys()
        ended = self._known.keys() - live.keys()
        further = [id_ for id_, said in self._known.items() if id_ in live and said.is_due(live[id_], now)]
        news = [*sorted(started), *sorted(ended), *sorted(further, key=lambda id_: self._known[id_].at)]
        for model_id in news[:_MOST_LINES]:
            self._say(f"run {short(model_id)}{self._said_of(model_id, live.get(model_id), now)}")
        if len(news) > _MOST_LINES:
            self._say(f"and {len(news) - _MOST_LINES} other runs with news: see `tinsmith status`")

    def _said_of(self, model_id: str, run: _Run | None, now: float) -> str:
        before = self._known.pop(model_id, None)
        if run is None:
            return f" has ended{self._end_of(model_id)}"
        self._known[model_id] = _Said(run.steps, run.tokens, now)
        if before is None:
            model = self._records.find(Model, model_id)
            return f" starts{_from(run.steps)}: {_of(model) if model else 'it was deleted'}"
        [progress] = self._records.progress([model_id], NEWEST_POINTS)
        return f": {described(progress, now)}"

    def _live(self) -> dict[str, _Run]:
        """The runs in use, by id."""
        heard = set(texts(self._redis.zrange(keys.SESSIONS_HEARD, 0, -1)))
        used = [id_ for id_ in self._records.ids(Model.namespace, "") if ids.session_of(id_) in heard]
        return {
            id_: _Run(int(fields.get("steps", 0)), int(fields.get("trained_tokens", 0)))
            for id_, fields in self._records.read_fields(Model.namespace, used, _FIELDS)
            if fields and not _over(fields)
        }

    def _end_of(self, model_id: str) -> str:
        fields = self._records.get(Model.namespace, model_id)
        if fields is None:
            return ": it was deleted"
        session = self._records.find(Session, ids.session_of(model_id))
        status = session.status if session else "expired"
        finished = "its session expired" if status == "expired" else f"its session was finished ({status})"
        return f" after {counted(int(fields.get('steps', 0)), 'step')}: {_over(fields) or finished}"


def _over(fields: Mapping[str, str]) -> str:
    """The reason why a run is over though its session goes on; empty for one that is not."""
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

"""The queue as a caller sees it: the caller's waiting calls with their positions, and the state of a pending future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from app import ids
from app.domain import records
from app.domain.accounts import Caller
from app.domain.records import Model, Sampler
from app.errors import Unavailable
from app.services.base_models import BaseModels, sampler_role, trainer_role
from app.services.queue_position import Place, Standings, describe
from app.services.views import Page
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.records import RedisRecords
from app.stores.redis.types import Call, Future, Unfinished

# A snapshot of the queue may take tens of milliseconds, so a client that polls constantly gets two a second.
_LOOK_S = 0.5
_SAMPLE = "sample"

_STATE_LOOK_S = 2.0
_PARENTS = 4096

# With this many calls waiting, a snapshot takes about 50 ms, most of it in this process. A call further behind gets no
# position.
_MOST_PLACES = 10_000


class QueueService:
    """Lists a caller's waiting calls. Positions are at most half a second old, and calls that have ended since are left
    out."""

    def __init__(
        self, looks: QueueLooks, states: QueueStates, backlog: RedisBacklog, calls: RedisCalls, store: RedisRecords
    ) -> None:
        self._looks, self._states, self._backlog, self._calls = looks, states, backlog, calls
        self._records = store

    def list(self, caller: Caller, page: Page) -> dict[str, Any]:
        """The body of GET queue: training calls by model and seq, then sampling requests by admission. Raises
        Unavailable."""
        look = self._looks.newest(_LOOK_S)
        if look is None:
            raise Unavailable("the state server does not answer or is full; try again soon")
        wanted, cursor = page.of(self._own(look, caller))
        pending = [call for call in self._calls.of(wanted) if call.state == "pending"]
        begun = self._backlog.running([call.request_id for call in pending if call.kind == _SAMPLE])
        now = self._records.now()
        rows = [self._row(look, call, now, begun=call.request_id in begun) for call in pending]
        return {"calls": rows, "cursor": cursor}

    def _own(self, look: Look, caller: Caller) -> Sequence[str]:
        models = sorted(line.model_id for line in look.unfinished.models if caller.sees(line.owner))
        seqs = self._backlog.seqs(models)
        training = [ids.request_id(model_id, seq) for model_id in models for seq in seqs[model_id]]
        return training + [one.request_id for one in look.unfinished.samples if caller.sees(one.owner)]

    def _row(self, look: Look, call: Call, now: float, *, begun: bool) -> dict[str, Any]:
        parent, _, seq = call.request_id.rpartition(":")
        state = self._states.at(look, call.request_id, call.kind, parent)
        runs = begun or (state.place is not None and state.place.running)
        return {
            "request_id": call.request_id,
            "kind": call.kind,
            "sampling_session_id" if call.kind == _SAMPLE else "model_id": parent,
            "seq_id": int(seq),
            "waited_s": round(max(0.0, now - call.admitted), 3),
            **({"state": "running", "reason": "it runs now"} if runs else _waiting(state)),
        }


def _waiting(state: QueueState) -> dict[str, Any]:
    """The row of a call that waits. The call at position 1 runs next, or runs already."""
    place = state.place
    where = {"position": place.before + 1, "estimated_start_s": place.starts_in_s} if place else {}
    return {"state": "waiting" if state.name == "active" else state.name, "reason": state.reason, **where}


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of a pending call. `reason` is for the user: the cause of a pause, or the calls that run first. The SDK
    logs the reason of a paused call."""

    name: str
    reason: str = ""
    place: Place | None = None


ACTIVE = QueueState("active")


class QueueStates:
    """Computes the queue state of pending futures. It is used only when a long poll times out, and 2,000 polls may do
    so within seconds. So one snapshot serves all polls for a moment, and the worker role that a future needs is cached,
    because it never changes."""

    def __init__(self, looks: QueueLooks, store: RedisRecords) -> None:
        self._looks, self._records = looks, store
        self._needs = lru_cache(_PARENTS)(self._find_needed)

    def of(self, future: Future) -> QueueState:
        """The state of a future that is still pending."""
        look = self._looks.newest(_STATE_LOOK_S)
        return self.at(look, future.request_id, future.kind, future.model_id) if look else ACTIVE

    def at(self, look: Look, request_id: str, kind: str, parent_id: str) -> QueueState:
        """The same state in a given snapshot; `parent_id` is the request's model or sampler."""
        needed = self._needs(kind == "sample", parent_id)
        place = look.standings.of(request_id)
        if needed and needed not in look.live:
            role, base = needed
            return QueueState("paused_capacity", f"no {role.replace('_', ' ')} of {base} is running", place)
        if look.shortage:
            return QueueState("paused_capacity", f"the server accepts no new work for now: {look.shortage}", place)
        return QueueState(ACTIVE.name, describe(place), place) if place else ACTIVE

    def _find_needed(self, sample: bool, parent_id: str) -> tuple[str, str] | None:
        """(role, base model) of the workers that run the call."""
        stored = self._records.get(Sampler.namespace if sample else Model.namespace, parent_id)
        if stored is None:
            return None
        if sample:
            sampler = records.load(Sampler, stored)
            return sampler_role(full=sampler.full), sampler.base_model
        model = records.load(Model, stored)
        return trainer_role(full=model.full), model.base_model


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of the queue. `live`: (role, base model) of the live workers. `shortage`: the reason why no call is
    admitted; empty while there is room."""

    live: frozenset[tuple[str, str]]
    shortage: str
    unfinished: Unfinished
    standings: Standings = field(repr=False)


class QueueLooks:
    """Takes and caches snapshots of the queue. One snapshot serves all polls within a moment, as 2,000 long polls may
    end within seconds. `weight_of` returns a project's weight."""

    def __init__(
        self, bases: BaseModels, oplog: RedisOpLog, backlog: RedisBacklog, weight_of: Callable[[str], float]
    ) -> None:
        self._bases, self._oplog, self._backlog, self._weight_of = bases, oplog, backlog, weight_of
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._newest: Look | None = None

    def newest(self, age_s: float) -> Look | None:
        """A snapshot at most about `age_s` old; None while none ever succeeded."""
        with self._lock:
            if time.monotonic() - self._looked > age_s:
                # The time is set first, so that in an outage only one caller per interval waits for the failure,
                # instead of all callers one after another.
                self._looked = time.monotonic()
                self._newest = self._look()
            return self._newest

    def _look(self) -> Look:
        workers, unfinished = self._bases.workers(), self._backlog.unfinished(_MOST_PLACES)
        live = frozenset((worker.role, worker.base_model) for worker in workers.values())
        return Look(live, self._oplog.shortage(), unfinished, Standings(unfinished, workers, self._weight_of))

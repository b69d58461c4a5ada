"""What a caller's projects have waiting, each call with its place. Others' calls are in it as counts and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app import ids
from app.domain.identity import Caller
from app.errors import Unavailable
from app.services.lists import Page
from app.services.queue_looks import Look, QueueLooks
from app.services.queue_states import QueueState, QueueStates
from app.stores.interfaces import Backlog, Call, Calls, Records

# A look may take tens of milliseconds: whoever asks all the time gets two a second.
_LOOK_S = 0.5
_SAMPLE = "sample"


class QueueService:
    """As of half a second ago at most, but nothing that has ended since."""

    def __init__(self, looks: QueueLooks, states: QueueStates, backlog: Backlog, calls: Calls, store: Records) -> None:
        self._looks, self._states, self._backlog, self._calls = looks, states, backlog, calls
        self._records = store

    def list(self, caller: Caller, page: Page) -> dict[str, Any]:
        """The body of GET queue: training calls by model and seq, then sampling requests by their admission. Raises
        Unavailable."""
        look = self._looks.newest(_LOOK_S)
        if look is None:
            raise Unavailable("the state server is away or full; try again soon")
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
    """Position 1 is the next to run, or runs."""
    place = state.place
    where = {"position": place.before + 1, "estimated_start_s": place.starts_in_s} if place else {}
    return {"state": "waiting" if state.name == "active" else state.name, "reason": state.reason, **where}

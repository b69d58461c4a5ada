"""Sampling requests that their client no longer waits for."""

from __future__ import annotations

from app.domain.identity import Caller
from app.errors import BadRequest
from app.services.ownership import check_role
from app.services.polls import Futures, check_request_id
from app.stores.interfaces import OpLog


class CancelService:
    """A cancelled request is a failed one: nothing of it runs any more, and its place is free at once."""

    def __init__(self, futures: Futures, oplog: OpLog) -> None:
        self._futures, self._oplog = futures, oplog

    def cancel(self, request_id: str, caller: Caller) -> None:
        """Fail it, unless its result is there. Raises NotFound or Gone as a poll does, Forbidden, or BadRequest for
        other futures."""
        check_request_id(request_id)
        future = self._futures.future(request_id, caller)
        check_role(caller, future.owner)
        if future.kind != "sample":
            raise BadRequest(
                f"{request_id} is the future of {future.kind}, and only sampling requests can be cancelled: a model's "
                "calls run in the order of their seqs, as those behind it were sent in the knowledge of it. To end all "
                "that a run has waiting, delete the run (DELETE /api/v1/training_runs/<run>); its checkpoints stay"
            )
        if future.result is None:
            self._oplog.cancel_sample(request_id)

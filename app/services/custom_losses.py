"""Custom losses: taken in, kept for their session, and looked up when a forward_backward names one.

Nothing has to run to make one, so its future is no more than its record (app/services/futures.py).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

from app import ids
from app.domain import codec, records
from app.domain.custom_losses import CustomLoss
from app.domain.identity import Caller
from app.domain.records import Loss, Session
from app.errors import BadRequest, NotFound
from app.services.allowances import AllowanceService
from app.services.ownership import load_owned, load_readable
from app.stores.interfaces import Records
from app.wire import custom_loss


class CustomLossService:
    """A loss never changes: its id is the session and the number its client gave it."""

    def __init__(self, store: Records, allowances: AllowanceService) -> None:
        self._records, self._allowances = store, allowances

    def create(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, str]:
        """A promise of the loss's id; the same one for a repeat.

        Raises NotFound (session), BadRequest for a graph that is not allowed or a number used for another one, and
        Unavailable while there is no room.
        """
        session_id, seq = asked["session_id"], asked["custom_loss_seq_id"]
        session = load_owned(self._records, Session, session_id, caller)
        loss = custom_loss.parse(asked["name"], asked["inputs"], asked["graph"])
        content = base64.b64encode(codec.encode(loss)).decode()
        loss_id = ids.loss_id(session_id, seq)
        if self._records.get(Loss.namespace, loss_id) is None:
            self._allowances.take(caller, session.owner)
        record = Loss(session.owner, session_id, time.time(), content)
        fresh = self._records.put_new(Loss.namespace, loss_id, records.dump(record))
        if not fresh and load_readable(self._records, Loss, loss_id, caller).content != content:
            raise BadRequest(f"custom_loss_seq_id {seq} was used before with other content")
        return {"request_id": loss_id}

    def find(self, caller: Caller, loss_id: str) -> CustomLoss:
        """Raises BadRequest: the call that names a loss which is not there is final, and its seq is consumed."""
        try:
            record = load_readable(self._records, Loss, loss_id, caller)
        except NotFound as error:
            raise BadRequest(str(error)) from None
        loss: CustomLoss = codec.decode(base64.b64decode(record.content))
        return loss

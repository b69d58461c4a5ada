"""Every future there is: those of the journal, and those of calls for which nothing has to run.

The latter have no more than the record they made or marked, and are done as long as it is there.
"""

from __future__ import annotations

import json

from app import ids
from app.domain.identity import Caller
from app.domain.records import Loss, Model
from app.domain.results import Result
from app.errors import NotFound
from app.services.ownership import Owned, load_readable
from app.stores.interfaces import Future, OpLog, Records

CUSTOM_LOSS, UNLOAD = "create_custom_loss", "unload_model"


class Futures:
    def __init__(self, oplog: OpLog, store: Records) -> None:
        self._oplog, self._records = oplog, store

    def future(self, request_id: str, caller: Caller) -> Future:
        """Raises NotFound for an unknown or foreign id (alike), Gone for an expired one."""
        model_id = ids.unloaded_by(request_id)
        if model_id is not None:
            return self._done(request_id, caller, Model, model_id, UNLOAD, "model_id")
        if ids.is_loss_id(request_id):
            return self._done(request_id, caller, Loss, request_id, CUSTOM_LOSS, "loss_id")
        # What a viewer reads is there as before for whoever waits for it.
        viewed = {project for project in caller.roles if not caller.may("member", project)}
        return self._oplog.future(request_id, caller.roles.keys(), viewed)

    def _done(self, request_id: str, caller: Caller, cls: type[Owned], key: str, kind: str, named: str) -> Future:
        try:
            owner = load_readable(self._records, cls, key, caller).owner
        except NotFound:
            raise NotFound(f"no future {request_id!r}") from None
        return Future(request_id, kind, "", owner, "done", Result(json.dumps({"type": kind, named: key}).encode()))
